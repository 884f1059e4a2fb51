"""Phases travel from vLLM's scheduler to its output processor, and into usage and metrics."""

import json
from types import SimpleNamespace

import pytest
from scheduler_driver import THINK_END, THINK_START, WORD, Job
from served_driver import JOBS, THINKS, Served, patch_output_processor
from vllm.entrypoints.generate.base.protocol import PerRequestMetrics
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.reasoning import ReasoningParserManager
from vllm.v1.metrics.stats import IterationStats

from meridian_patch.config.schema import ResponsesConfig
from meridian_patch.engine import wire
from meridian_patch.engine.api import phase_changes, reasoning_usage
from meridian_patch.engine.api.chat import build_chat_serving
from meridian_patch.engine.api.completion import build_completion_serving
from meridian_patch.engine.api.phase_times import times_of
from meridian_patch.engine.api.reasoning_usage import UsageDetails
from meridian_patch.engine.api.request_state import build_request_state
from meridian_patch.engine.api.responses import build_responses_serving
from meridian_patch.engine.api.stat_logger import build_prometheus_stat_logger
from meridian_patch.errors import ConfigError
from meridian_patch.phase.progress import PhaseChange, PhaseProgress
from meridian_patch.telemetry import counters


@pytest.fixture(autouse=True)
def patched(monkeypatch, demo_model):
    patch_output_processor(monkeypatch, demo_model)


EXPECTED = {"thinks": 12, "plain": 0, "cut": 20, "own": 5}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_counts_are_those_of_the_scheduler(demo_model, is_async):
    """Per request, thoughts still open included; nothing of it is left for the caller to see."""
    served = Served(demo_model, is_async=is_async)
    for job in JOBS.values():
        served.add(job)
    served.driver.drain()
    for name, expected in EXPECTED.items():
        details = UsageDetails()
        for output in served.outputs(name):
            details.saw(0, output)
        assert details.reasoning_tokens == expected, name
    assert set(served.params) == {None}


def test_times_are_the_engines(demo_model):
    """Gaps by phase, on the driver's clock; one observation per request where it ends."""
    served = Served(demo_model)
    for job in JOBS.values():
        served.add(job)
    served.driver.drain()
    total = {}
    for times in served.stats:
        for key, values in times.values.items():
            total[key] = total.get(key, 0) + sum(values.values())
    tokens = {name: sum(map(len, (o.token_ids for o in served.outputs(name)))) for name in JOBS}
    # Thoughts with their boundaries.
    assert sum(each.tokens[0] for each in served.stats) == (12 + 1) + 20 + (1 + 5 + 1)
    assert sum(sum(each.tokens) for each in served.stats) == sum(tokens.values())
    assert total["ttfat:yes"] == 2
    assert total["ttfat:no"] == 1
    assert total["phase_seconds:think"] == 3
    assert total["gap:ttot"] == 2
    every_gap = sum(count for key, count in total.items() if key.startswith("gap:"))
    assert every_gap == sum(tokens.values()) - len(JOBS)
    cut = served.outputs("cut")[-1]
    assert set(cut.meridian) == {"think_ms", "preemptions"}
    assert set(served.outputs("thinks")[-1].meridian) >= {"think_ms", "ttfat_ms", "answer_ms"}
    assert served.outputs("plain")[-1].meridian == {}


def test_preempted_requests_say_so(demo_model):
    """Counted per request, and the tokens that are computed again by phase."""
    served = Served(demo_model, blocks=12)
    for number in range(4):
        served.add(Job(f"r{number}", THINKS, 150, 10))
    served.driver.drain()
    told = [served.outputs(f"r{number}")[-1].meridian["preemptions"] for number in range(4)]
    totals = served.driver.scheduler.phase_counters.totals
    assert sum(told) == sum(n for key, n in totals.items() if key.startswith("preemption:")) > 0
    again = sum(n for key, n in totals.items() if key.startswith("recomputed_tokens:"))
    assert again > 0


def test_a_stock_output_processor_gets_nothing(demo_model, monkeypatch):
    """As with `--scheduler-cls` alone: it would hand our key to the caller."""
    served = Served(demo_model)
    monkeypatch.setattr(phase_changes, "output_processor", SimpleNamespace(OutputProcessor=object))
    served.add(JOBS["thinks"])
    served.driver.drain()
    details = UsageDetails()
    for output in served.outputs("thinks"):
        details.saw(0, output)
    assert details.reasoning_tokens is None
    assert set(served.params) == {None}


def test_a_failure_of_ours_is_not_the_requests(demo_model, monkeypatch):
    """The outputs reach the caller as in stock, without our key."""
    served = Served(demo_model)
    served.add(JOBS["thinks"])
    monkeypatch.setattr("meridian_patch.engine.api.tracing.follow_outputs", None)
    served.driver.drain()
    assert served.outputs("thinks")[-1].finish_reason == "stop"
    assert set(served.params) == {None}


def test_a_failure_for_one_request_is_not_the_others(demo_model, monkeypatch):
    """Its count is stock's from then on; the others' stay ours."""
    served = Served(demo_model)
    for name in ("thinks", "cut"):
        served.add(JOBS[name])
    served.driver.step()

    class Broken(PhaseProgress):
        @property
        def place(self):
            raise RuntimeError

        @place.setter
        def place(self, value):
            pass

    broken = Broken()
    broken._change = PhaseChange(True, 0, 0)
    served.processor.request_states["cut"].progress = broken
    served.driver.drain()
    said = {}
    for name in ("thinks", "cut"):
        said[name] = UsageDetails()
        for output in served.outputs(name):
            said[name].saw(0, output)
    assert said["thinks"].reasoning_tokens == EXPECTED["thinks"]
    assert broken.reasoning_tokens(5) is None
    assert served.outputs("thinks")[-1].meridian["think_ms"] > 0


def test_an_unknown_choice_leaves_the_whole_count_to_stock(choices):
    """A sum without one of the choices would be too low."""
    progress, said = choices[0]
    assert details_of((progress, said), (PhaseProgress(), 5)).reasoning_tokens is None
    assert details_of((progress, said), (PhaseProgress(), 0)).reasoning_tokens == 12


@pytest.mark.parametrize(
    "build",
    [
        build_request_state,
        build_chat_serving,
        build_completion_serving,
        build_responses_serving,
    ],
)
def test_a_wrong_configuration_is_refused_when_the_patch_is_built(build, monkeypatch):
    """A request would meet it on the loop that serves all requests, and end them."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_RESPONSES__TIMES", "perhaps")
    reasoning_usage.responses_config.cache_clear()
    with pytest.raises(ConfigError, match=r"responses\.times"):
        build(object)


def test_a_configuration_that_went_wrong_later_ends_no_request(demo_model, monkeypatch):
    """It was read when the patches were built."""
    served = Served(demo_model)
    served.add(JOBS["thinks"])
    monkeypatch.setenv("MERIDIAN_PATCH_SET_RESPONSES__TIMES", "perhaps")
    served.driver.drain()
    assert served.outputs("thinks")[-1].meridian["think_ms"] > 0


def test_times_that_cannot_be_told_end_no_request(demo_model, monkeypatch):
    """The request ends as in stock."""
    monkeypatch.setattr("meridian_patch.engine.api.request_state.milliseconds", None)
    served = Served(demo_model)
    served.add(JOBS["thinks"])
    served.driver.drain()
    assert served.outputs("thinks")[-1].finish_reason == "stop"
    assert "think_ms" not in served.outputs("thinks")[-1].meridian


def test_there_are_no_times_without_vllms_statistics(demo_model):
    """With `--disable-log-stats` tokens are counted, and no time of 0 is told."""
    served = Served(demo_model, log_stats=False)
    served.add(JOBS["thinks"])
    served.driver.drain()
    details = UsageDetails()
    for output in served.outputs("thinks"):
        details.saw(0, output)
    assert details.reasoning_tokens == EXPECTED["thinks"]
    assert details.times == {}
    assert "think_ms" not in served.outputs("thinks")[-1].meridian


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_open_thoughts_are_unknown_once_the_tracker_is_off(demo_model, is_async):
    """Otherwise all that follows would count as reasoning; stock's count stands in."""
    served = Served(demo_model, is_async=is_async)
    served.add(JOBS["thinks"])
    for _ in range(6):
        served.driver.step()
    served.driver.scheduler._switch_off([counters.PHASE_TRACKER])
    served.add(JOBS["plain"])
    served.driver.drain()
    for name in ("thinks", "plain"):
        details = UsageDetails()
        for output in served.outputs(name):
            details.saw(0, output)
        assert details.reasoning_tokens is None
    assert set(served.params) == {None}


def test_vllms_front_end_in_rust_gets_nothing(demo_model, monkeypatch):
    """It would hand our keys to the caller, as it has no class of ours."""
    served = Served(demo_model)
    seen = []
    take = served.take
    served.take = lambda sent: (
        seen.extend(output.kv_transfer_params for output in sent.outputs),
        take(sent),
    )
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    served.add(JOBS["thinks"])
    served.driver.drain()
    assert seen
    assert set(seen) == {None}


def test_metrics_that_cannot_be_exported_end_no_request(monkeypatch):
    """vLLM's own are exported all the same."""

    class Stock:
        engine_indexes = (0,)
        recorded = 0

        def __init__(self, vllm_config):
            pass

        def record(self, *args):
            self.recorded += 1

    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))
    logger = build_prometheus_stat_logger(Stock)(config)
    monkeypatch.setattr(logger._meridian, "record", None)
    stats = SimpleNamespace(**{wire.COUNTS: {"tokens:think": 1}})
    iteration = IterationStats()
    times_of(iteration)
    logger.record(stats, iteration)
    assert logger.recorded == 1


def details_of(*choices):
    """Details that saw these choices: progress and number of tokens."""
    details = UsageDetails()
    for index, (progress, said) in enumerate(choices):
        details.saw(index, SimpleNamespace(**{wire.PROGRESS: progress}, token_ids=[WORD] * said))
    return details


@pytest.fixture
def choices(demo_model):
    """Two choices: 12 of 20 tokens are reasoning, and 20 of 20."""
    served = Served(demo_model)
    for name in ("thinks", "cut"):
        served.add(JOBS[name])
    served.driver.drain()
    return [(getattr(served.outputs(name)[-1], wire.PROGRESS), 20) for name in ("thinks", "cut")]


def test_a_response_has_the_sum(choices):
    """In stock's own model; a response of an error has no usage."""
    response = ChatCompletionResponse(
        model="m", choices=[], usage=UsageInfo(), metrics=PerRequestMetrics()
    )
    details_of(*choices).add_to(response)
    said = response.model_dump(mode="json")
    assert said["usage"]["completion_tokens_details"] == {"reasoning_tokens": 32}
    # Times are of one request.
    assert "think_time_ms" not in said["metrics"]
    details_of(choices[0]).add_to(response)
    times = response.model_dump(mode="json")["metrics"]
    assert times["time_to_first_answer_token_ms"] > 0
    assert times["think_time_ms"] == pytest.approx(12 * 10.1, rel=0.3)
    details_of(choices[0]).add_to(SimpleNamespace(error="no usage"))


def test_a_stream_has_counts_of_what_it_said(choices):
    """Beside a choice that choice's, so far; at the end the sum; other events pass to the byte."""
    details = details_of(*choices)

    def said(chunk):
        event = details.add_to_event(f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n")
        usage = json.loads(event.removeprefix("data: "))["usage"]
        return usage["completion_tokens_details"]["reasoning_tokens"]

    assert said({"choices": [{"index": 0}], "usage": {"completion_tokens": 5}}) == 5
    assert said({"choices": [{"index": 0}], "usage": {"completion_tokens": 15}}) == 12
    assert said({"choices": [{"index": 1}], "usage": {"completion_tokens": 15}}) == 15
    assert said({"choices": [], "usage": {"completion_tokens": 40}}) == 32
    for event in ('data: {"choices":[],"usage":null}\n\n', "data: [DONE]\n\n"):
        assert details.add_to_event(event) is event


def test_it_can_be_switched_off(choices, monkeypatch):
    """Stock's count then stays, in events too, and no time is told."""
    off = ResponsesConfig(reasoning_tokens=False, times=False)
    monkeypatch.setattr(reasoning_usage, "responses_config", lambda: off)
    details = details_of(choices[0])
    response = SimpleNamespace(usage=UsageInfo(), metrics=PerRequestMetrics())
    details.add_to(response)
    assert response.usage.completion_tokens_details is None
    assert details.times == {}
    event = 'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n'
    assert json.loads(details.add_to_event(event)[6:])["usage"] == {"completion_tokens": 1}


class Vocabulary:
    """In place of a tokenizer, for parsers that look their markers up."""

    def get_vocab(self):
        return {"<think>": THINK_START, "</think>": THINK_END, "<response>": 1, "</response>": 2}


def test_stock_counts_no_thought_that_the_prompt_opens():
    """Why there is a count of ours; where the model opens the thought, both are the same."""
    parser = ReasoningParserManager.get_reasoning_parser("ernie45")(Vocabulary())
    thought, answer = [WORD] * 5, [WORD] * 3
    assert parser.count_reasoning_tokens([*thought, THINK_END, *answer]) == 0
    own = [THINK_START, *thought, THINK_END, *answer]
    assert parser.count_reasoning_tokens(own) == EXPECTED["own"]
