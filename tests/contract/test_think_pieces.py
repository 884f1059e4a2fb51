"""Thoughts are streamed in larger pieces, answers as ever: on vLLM's own output processor."""

import random
from itertools import chain

import pytest
import torch
from scheduler_driver import THINK_END, THINK_START, WORD, Job
from served_driver import PLAIN, THINKS, Served, core_request, patch_output_processor
from vllm import PoolingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine import output_processor as upstream

from meridian_patch.engine.api import think_pieces
from meridian_patch.engine.api.request_state import build_request_state

INTERVAL = 8


@pytest.fixture(autouse=True)
def patched(monkeypatch, demo_model):
    monkeypatch.setenv("MERIDIAN_PATCH_SET_RESPONSES__THINK_STREAM_INTERVAL", str(INTERVAL))
    patch_output_processor(monkeypatch, demo_model)
    # Another test's process may have been patched before, without pieces.
    classes = upstream.RequestState.__mro__
    stock = next(each for each in classes if each.__module__ == upstream.__name__)
    monkeypatch.setattr(upstream, "RequestState", build_request_state(stock))


def pieces(served, name):
    return [list(output.token_ids) for output in served.outputs(name)]


def said(job):
    """All tokens of a job, as its model says them."""
    thinking = 0 if job.think_tokens is None else job.think_tokens + 1
    number = min(thinking + job.answer_tokens + 1, job.max_tokens)
    return [job.token(index) for index in range(number)]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_thought_comes_in_pieces_and_an_answer_by_token(demo_model, is_async):
    """The first token at once, and the rest of a thought with its end."""
    served = Served(demo_model, is_async=is_async)
    served.add(Job("thinks", THINKS, 36, 7))
    served.add(Job("plain", PLAIN, None, 9))
    served.add(Job("cut", THINKS, 40, 7, max_tokens=20))
    served.driver.drain()
    # A thought of 36 tokens and its end, then an answer of seven and its end.
    assert list(map(len, pieces(served, "thinks"))) == [1, 8, 8, 8, 8, 4] + [1] * 8
    assert list(map(len, pieces(served, "plain"))) == [1] * 10
    assert list(map(len, pieces(served, "cut"))) == [1, 8, 8, 3]


def test_a_thought_that_the_model_opens_begins_at_once(demo_model):
    """Parsers look for the marker in a piece of its own."""
    served = Served(demo_model)
    again = (WORD, THINK_START, *[WORD] * 11, THINK_END, WORD, WORD)
    served.add(Job("own", PLAIN, None, 20, opening=again))
    served.driver.drain()
    assert pieces(served, "own")[:4] == [
        [WORD],
        [THINK_START],
        [WORD] * 8,
        [*[WORD] * 3, THINK_END],
    ]


@pytest.mark.parametrize(
    ("parser", "takes"),
    (
        (None, True),
        ("", True),
        ("qwen3", True),
        ("glm45", True),
        ("deepseek_r1", False),
        ("hunyuan_a13b", False),
        ("granite", False),
        ("not_there", False),
    ),
)
def test_parsers_that_take_one_token_at_a_time_get_it(parser, takes):
    assert think_pieces._takes_pieces(parser) is takes


def test_a_request_without_tokens_is_upstreams(demo_model):
    """As one for an embedding, whose state has no detokenizer."""
    served = Served(demo_model)
    made = core_request("pooled", PLAIN, None, "pooled")
    made.pooling_params = PoolingParams(task="embed")
    queue = upstream.RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "pooled")
    served.processor.add_request(made, None, None, 0, queue)
    vector = torch.zeros(4)
    output = EngineCoreOutput("pooled", [], pooling_output=vector, finish_reason=FinishReason.STOP)
    served.processor.process_outputs([output], 1.0, None)
    assert queue.get_nowait().outputs.data is vector


def test_a_token_that_waits_is_sent_when_the_phase_is_lost(demo_model):
    """With an output that has no new one, as of a request that is aborted."""
    served = Served(demo_model)
    served.add(Job("r", THINKS, 40, 7))
    for _ in range(3):
        served.driver.step()
    assert len(pieces(served, "r")) < 3
    served.processor.request_states["r"].progress.lose()
    served.processor.abort_requests(["r"], internal=True)
    served.take(EngineCoreOutputs())
    told = list(chain.from_iterable(pieces(served, "r")))
    assert len(told) == len(served.driver.deliveries["r"])


@pytest.mark.parametrize("own", [1, 3, 20])
def test_nothing_is_lost_or_repeated(demo_model, own):
    """Whatever the interval of vLLM's own is, with thoughts that the model opens within answers."""
    rng = random.Random(own)
    served = Served(demo_model, is_async=True)
    served.processor.stream_interval = own
    again = (WORD, THINK_START, *[WORD] * 11, THINK_END, WORD, WORD)
    for number in range(40):
        job = Job(
            f"r{number}",
            *((THINKS, rng.randrange(30)) if rng.random() < 0.7 else (PLAIN, None)),
            rng.randrange(20, 40),
            opening=again if rng.random() < 0.5 else (),
            max_tokens=rng.choice((1500, rng.randrange(1, 40))),
        )
        served.add(job)
    served.driver.drain()
    for name, job in served.driver.jobs.items():
        got = pieces(served, name)
        assert list(chain.from_iterable(got)) == said(job), name
        assert max(map(len, got)) <= max(own, INTERVAL) + 1
