"""Fields in, summaries out, on vLLM's own classes: no engine, no server."""

import json
from types import SimpleNamespace

import pytest
from served_driver import core_request
from vllm import PoolingParams, SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine import output_processor as upstream
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from meridian_patch.engine import wire
from meridian_patch.engine.api import exit_summary
from meridian_patch.engine.api.input_check import build_input_processor
from meridian_patch.engine.api.request_state import build_request_state
from meridian_patch.engine.upstream import is_release
from meridian_patch.exit.actions import Close, ExitReport, Outcome
from meridian_patch.patching.candidate import MARK

EAT = ExitReport(Outcome("eat", 800, None, 0), 812)
SUMMARY = {"exit_reason": "eat", "think_tokens": 812}
# From vLLM 0.33 on a session's queue keeps its turns apart.
SESSION_QUEUE = getattr(upstream, "StreamingInputOutputCollector", upstream.RequestOutputCollector)
CONNECTOR = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}


class StockProcessor:
    """In place of vLLM's, which wants a model."""

    vllm_config = None
    renderer = SimpleNamespace(tokenizer=None)

    def process_inputs(self, request_id, prompt, params, supported_tasks, priority=0):
        return request_id, priority


Processor = build_input_processor(StockProcessor)


def process(params, **more):
    return Processor().process_inputs("r", "prompt", params, supported_tasks=("generate",), **more)


def test_a_wrong_field_is_refused_before_anything_else():
    """It is a ValueError to Python and a 400 to HTTP, and names field, value and expectation."""
    params = SamplingParams(extra_args={"meridian_exit": "on"})
    with pytest.raises(ValueError, match="meridian_exit is 'on', expected 'off', 'observe'") as got:
        process(params)
    assert isinstance(got.value, VLLMClientError)
    error = create_error_response(got.value).error
    assert error.code == 400
    assert error.type == "BadRequestError"
    assert error.param == "vllm_xargs"
    assert "known fields: meridian_itl_ms" in error.message


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(extra_args={"session_id": "s", "somebody_elses": -1}),
        SamplingParams(extra_args={"meridian_exit": "observe", "meridian_itl_ms": 40}),
        PoolingParams(),
    ],
    ids=("none", "others", "right", "pooling"),
)
def test_all_else_passes_as_it_is(params):
    """Right fields, those of others and pooling requests go on to vLLM."""
    assert process(params, priority=3) == ("r", 3)


@pytest.fixture
def allowed(monkeypatch):
    """Sets ``requests.allowed_fields`` as an operator does."""

    def allow(fields):
        monkeypatch.setenv("MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS", fields)
        exit_summary.allowed_fields.cache_clear()

    return allow


@pytest.mark.parametrize("fields", ["[meridian_exit]", "[]"])
def test_a_field_that_is_not_allowed_is_refused(allowed, fields):
    """HTTP 400 with the field's name and the names that are allowed."""
    allowed(fields)
    params = SamplingParams(extra_args={"other": 1, "meridian_itl_ms": 40})
    with pytest.raises(ValueError, match="field meridian_itl_ms is not allowed on this") as got:
        process(params)
    error = create_error_response(got.value).error
    assert (error.code, error.param) == (400, "vllm_xargs")
    assert f"expected only: {fields.strip('[]') or 'none'}" in error.message


@pytest.mark.parametrize(
    ("field", "value", "is_allowed"),
    [
        ("meridian_priority", -1, False),
        ("meridian_itl_ms", 40, False),
        ("meridian_loop_min_count", 3, False),
        ("meridian_loop_max_pattern_size", 8, False),
        ("meridian_loop_min_pattern_size", 8, False),
        ("meridian_exit_patterns", [[65]], False),
        ("meridian_exit", "enforce", True),
        ("meridian_max_think_tokens", 8, True),
        ("meridian_min_think_tokens", 8, True),
        ("meridian_eat_delta", 0.1, True),
        ("meridian_rpdi_lambda", 2.0, True),
        ("meridian_wrap_up", "", True),
        ("meridian_stop_scope", "answer", True),
    ],
)
def test_by_default_no_field_takes_from_others(allowed, monkeypatch, field, value, is_allowed):
    """What costs others more than a bound of the configuration is refused."""
    allowed("all")
    monkeypatch.delenv("MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS")
    params = SamplingParams(extra_args={field: value})
    if is_allowed:
        assert process(params) == ("r", 0)
    else:
        with pytest.raises(ValueError, match=f"field {field} is not allowed on this server"):
            process(params)


def test_an_allowed_field_passes(allowed):
    """A list allows what it names, and a wrong value is still refused for what it is."""
    allowed("[meridian_exit]")
    params = SamplingParams(extra_args={"other": 1, "meridian_exit": "observe"})
    assert process(params) == ("r", 0)
    with pytest.raises(ValueError, match="meridian_exit is 'on', expected 'off', 'observe'"):
        process(SamplingParams(extra_args={"meridian_exit": "on"}))


@pytest.mark.parametrize("number", [-(2**63), 2**63, 2**64 - 1])
def test_a_number_out_of_bounds_is_refused(number):
    """vLLM takes it; as a priority it is a mistake, and the caller reads why."""
    with pytest.raises(ValueError, match=f"meridian_priority is {number}, expected "):
        process(SamplingParams(extra_args={"meridian_priority": number}))


@pytest.fixture
def patched(monkeypatch):
    """vLLM's output processor with our request states, as `patches` binds them."""
    ours = build_request_state(upstream.RequestState)
    setattr(ours, MARK, "request_state")
    monkeypatch.setattr(upstream, "RequestState", ours)


class Frontend:
    """vLLM's output processor; holds what it hands on, as a slow caller would."""

    def __init__(self, kind=RequestOutputKind.DELTA, n=1, *, is_session=False):
        self.processor = upstream.OutputProcessor(None, log_stats=False)
        params = SamplingParams(output_kind=kind, detokenize=False, n=n, max_tokens=8)
        self.queue = (SESSION_QUEUE if is_session else upstream.RequestOutputCollector)(kind, "r")
        whole = request("r", params)
        parent = ParentRequest(whole) if n > 1 else None
        for index in range(n):
            name, child = parent.get_child_info(index) if parent else ("r", params)
            sent = request(name, child, is_session=is_session)
            self.processor.add_request(sent, None, parent, index, self.queue)

    def send_chunk(self):
        """The next chunk of a session."""
        params = SamplingParams(detokenize=False, max_tokens=8)
        sent = request("r", params, is_session=True)
        self.processor.add_request(sent, None, None, 0, self.queue)

    def take(self, *outputs):
        """Let engine outputs pass through the wire and the output processor."""
        sent = EngineCoreOutputs(outputs=list(outputs))
        frames = MsgpackEncoder().encode(sent)
        arrived = MsgpackDecoder(EngineCoreOutputs).decode(frames)
        self.processor.process_outputs(arrived.outputs, 0.0)

    def seen(self) -> RequestOutput:
        return self.queue.get_nowait()


def request(name, params, *, is_session=False):
    return core_request(name, [1, 2], params, "r", is_session=is_session)


def output(name="r", tokens=(5,), *, finished=False, outcome=None, **more):
    made = EngineCoreOutput(
        name, list(tokens), finish_reason=FinishReason.LENGTH if finished else None, **more
    )
    if outcome:
        exit_summary.attach_all({0: EngineCoreOutputs(outputs=[made])}, {name: outcome})
    return made


@pytest.mark.usefixtures("patched")
def test_a_summary_arrives_with_the_last_output():
    """It crosses the wire in the step in which the thought ended, and stays until the end."""
    frontend = Frontend()
    frontend.take(output())
    assert frontend.seen().outputs[0].meridian == {}
    frontend.take(output(outcome=EAT))
    frontend.take(output(finished=True))
    last = frontend.seen()
    assert last.outputs[0].meridian == SUMMARY
    assert last.outputs[0].finish_reason == "length"
    assert last.kv_transfer_params is None


@pytest.mark.usefixtures("patched")
def test_a_slow_caller_loses_nothing():
    """Outputs that were not taken are merged into the first, whose summary is the last."""
    frontend = Frontend()
    frontend.take(output())
    frontend.take(output(outcome=EAT))
    frontend.take(output(finished=True))
    only = frontend.seen().outputs[0]
    assert list(only.token_ids) == [5, 5, 5]
    assert only.meridian == SUMMARY


@pytest.mark.usefixtures("patched")
def test_the_last_thought_counts():
    """What was said of an earlier one is forgotten, all of it."""
    frontend = Frontend()
    due = Close("rpdi", 1, 2, "figures")
    frontend.take(output(outcome=ExitReport(Outcome("natural", 9, due, 0), 9)))
    frontend.take(output(outcome=EAT))
    assert frontend.seen().outputs[0].meridian == SUMMARY


@pytest.mark.usefixtures("patched")
def test_each_turn_of_a_session_has_its_own():
    """What a caller holds of one turn stays, and the next turn says only what it did itself."""
    frontend = Frontend(is_session=True)
    frontend.take(output(finished=True, outcome=EAT))
    first = frontend.seen().outputs[0]
    frontend.send_chunk()
    frontend.take(output())
    assert frontend.seen().outputs[0].meridian == {}
    natural = ExitReport(Outcome("natural", 3, None, 0), 3)
    frontend.take(output(finished=True, outcome=natural))
    last = frontend.seen().outputs[0]
    assert last.meridian["exit_reason"] == "natural"
    assert first.meridian == SUMMARY
    # Phases and counts begin anew, too.
    assert getattr(last, wire.PROGRESS) is not getattr(first, wire.PROGRESS)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
@pytest.mark.skipif(is_release("0.33"), reason="vLLM merges turns before 0.33")
def test_two_turns_that_are_read_at_once_say_how_the_last_one_ended(is_told):
    """vLLM merges them, and the reason of the end is the last turn's, too."""
    frontend = Frontend(is_session=True)
    frontend.take(output(finished=True, outcome=EAT))
    frontend.send_chunk()
    natural = ExitReport(Outcome("natural", 3, None, 0), 3) if is_told else None
    frontend.take(output(finished=True, outcome=natural))
    both = frontend.seen().outputs[0]
    assert list(both.token_ids) == [5, 5]
    assert both.meridian == ({"exit_reason": "natural", "think_tokens": 3} if is_told else {})


@pytest.mark.usefixtures("patched")
@pytest.mark.skipif(not is_release("0.33"), reason="vLLM keeps turns apart from 0.33 on")
def test_two_turns_that_are_read_late_say_how_each_of_them_ended():
    """Outputs within the second turn are merged, and have its last summary."""
    frontend = Frontend(is_session=True)
    frontend.take(output(finished=True, outcome=EAT))
    frontend.send_chunk()
    frontend.take(output())
    natural = ExitReport(Outcome("natural", 3, None, 0), 3)
    frontend.take(output(finished=True, outcome=natural))
    first, second = frontend.seen().outputs[0], frontend.seen().outputs[0]
    assert first.meridian == SUMMARY
    assert list(second.token_ids) == [5, 5]
    assert second.meridian == {"exit_reason": "natural", "think_tokens": 3}
    assert getattr(second, wire.PROGRESS) is not getattr(first, wire.PROGRESS)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_turn_that_is_read_late_keeps_what_was_said_of_it(kind):
    """The next turn is under way, and has no output of its own yet where only ends are told."""
    frontend = Frontend(kind, is_session=True)
    frontend.take(output(finished=True, outcome=EAT))
    frontend.send_chunk()
    first = frontend.seen() if kind != RequestOutputKind.FINAL_ONLY else None
    frontend.take(output())
    first = first or frontend.seen()
    assert first.outputs[0].meridian == SUMMARY


@pytest.mark.usefixtures("patched")
def test_what_a_connector_says_stays_as_it_is():
    """A prefill node's parameters reach its proxy without a word of ours."""
    frontend = Frontend(RequestOutputKind.FINAL_ONLY)
    frontend.take(output(finished=True, outcome=EAT, kv_transfer_params=dict(CONNECTOR)))
    last = frontend.seen()
    assert last.kv_transfer_params == CONNECTOR
    assert last.outputs[0].meridian == SUMMARY


@pytest.mark.usefixtures("patched")
def test_each_sample_has_its_own():
    """With n > 1 the samples end differently, and say so."""
    frontend = Frontend(RequestOutputKind.FINAL_ONLY, n=2)
    natural = ExitReport(Outcome("natural", 3, None, 0), 3)
    frontend.take(
        output("0_r", finished=True, outcome=EAT), output("1_r", finished=True, outcome=natural)
    )
    reasons = [each.meridian["exit_reason"] for each in frontend.seen().outputs]
    assert reasons == ["eat", "natural"]


def test_nothing_is_sent_where_it_is_not_taken_out(monkeypatch):
    """With `--scheduler-cls` alone the API server is stock: `kv_transfer_params` stay empty."""
    # Another test may have patched this process.
    stock = SimpleNamespace(RequestState=object)
    monkeypatch.setattr(exit_summary, "output_processor", stock)
    assert output(outcome=EAT).kv_transfer_params is None
    frontend = Frontend(RequestOutputKind.FINAL_ONLY)
    frontend.take(output(finished=True, outcome=EAT))
    assert frontend.seen().kv_transfer_params is None


def completion(index=0, *, finish_reason="stop", summary=None):
    made = CompletionOutput(index, "text", [1], None, None, finish_reason=finish_reason)
    if summary is not None:
        made.meridian = summary
    return made


def test_a_response_carries_it_in_its_choice():
    """A field more in the choice that it belongs to, and nothing in the others."""
    message = ChatMessage(role="assistant", content="4")
    choices = [ChatCompletionResponseChoice(index=i, message=message) for i in range(2)]
    summaries = exit_summary.Summaries()
    summaries.saw(0, completion())
    summaries.saw(1, completion(1, summary=SUMMARY))
    summaries.add_to(choices)
    response = ChatCompletionResponse(model="m", choices=choices, usage=UsageInfo())
    first, second = response.model_dump(mode="json")["choices"]
    assert "meridian" not in first
    assert second["meridian"] == SUMMARY


def test_a_stream_carries_it_in_the_last_chunk_of_its_choice():
    """Chunks before it, usage and the end of the stream pass as they are, to the byte."""
    begun = 'data: {"choices":[{"index":0,"delta":{"content":"ü"},"finish_reason":null}]}\n\n'
    ended = 'data: {"choices":[{"index":0,"delta":{"content":"ü"},"finish_reason":"stop"}]}\n\n'
    usage = 'data: {"choices":[],"usage":{"total_tokens":3}}\n\n'
    summaries = exit_summary.Summaries()
    assert summaries.add_to_event(ended) is ended
    summaries.saw(0, completion(finish_reason=None, summary=SUMMARY))
    assert summaries.add_to_event(ended) is ended
    summaries.saw(0, completion(summary=SUMMARY))
    assert summaries.add_to_event(begun) is begun
    changed = summaries.add_to_event(ended)
    assert "ü" in changed
    assert changed.endswith("\n\n")
    (choice,) = json.loads(changed.removeprefix("data: "))["choices"]
    assert choice["meridian"] == SUMMARY
    assert summaries.add_to_event(usage) is usage
    assert summaries.add_to_event("data: [DONE]\n\n") == "data: [DONE]\n\n"


def test_a_request_that_did_not_think_says_nothing():
    """No field at all, not an empty one."""
    choice = SimpleNamespace(index=0)
    summaries = exit_summary.Summaries()
    summaries.saw(0, completion(summary={}))
    summaries.add_to([choice])
    assert not hasattr(choice, "meridian")
