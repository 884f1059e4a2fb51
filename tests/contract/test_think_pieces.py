"""Thoughts are streamed in larger pieces, answers as ever: on vLLM's own output processor."""

import random
from itertools import chain

import pytest
from scheduler_driver import THINK_END, THINK_START, WORD, Job
from served_driver import PLAIN, THINKS, Served, patch_output_processor

INTERVAL = 8


@pytest.fixture(autouse=True)
def patched(monkeypatch, demo_model):
    monkeypatch.setenv("MERIDIAN_PATCH_SET_RESPONSES__THINK_STREAM_INTERVAL", str(INTERVAL))
    patch_output_processor(monkeypatch, demo_model)


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
