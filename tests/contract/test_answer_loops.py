"""Answers that repeat themselves, on the real scheduler: their requests end where asked."""

from dataclasses import dataclass
from functools import partial

import pytest
from exit_driver import exit_driver, is_empty, thinker
from scheduler_driver import THINK_END, WORD, Job
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

SIZE, COUNT = 3, 4
LOOP = {
    "EXIT__EAT": "false",
    "EXIT__RPDI": "false",
    "EXIT__LOOP": "true",
    "EXIT__LOOP_MAX_PATTERN_SIZE": "8",
    "EXIT__LOOP_MIN_COUNT": str(COUNT),
    "EXIT__LOOP_SCOPE": "all",
}
LOOPS_FROM = 20


@dataclass(frozen=True)
class Rambler(Job):
    """An answer that repeats nothing until a token; from there on three tokens, over and over."""

    loops_from: int = LOOPS_FROM
    loops_for: int = 10_000

    def token(self, index):
        said = super().token(index)
        begin = 0 if self.think_tokens is None else self.think_tokens + 1
        if said == WORD and index < begin:
            return 60 + index * 7 % 50
        place = index - begin - self.loops_from
        if said != WORD:
            return said
        return 60 + index % SIZE if 0 <= place < self.loops_for else 60 + index * 7 % 50


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def driver_for(request, monkeypatch, demo_model):
    return partial(exit_driver, monkeypatch, demo_model, is_async=request.param)


def play(driver, job, fields=None, **sampling):
    driver.jobs[job.request_id] = job
    driver.deliveries[job.request_id] = []
    request = driver._request_of(job, extra_args=fields, **sampling)
    driver.scheduler.add_request(request)
    driver.drain()
    assert is_empty(driver)
    return request


def rambler(name="r", think_tokens=30, **kwargs):
    return Rambler(name, thinker(name).prompt, think_tokens, 300, **kwargs)


def counted(driver):
    totals = driver.scheduler.phase_counters.totals
    return {name: n for name, n in totals.items() if name.startswith("answer_loop")}


@pytest.mark.parametrize("think_tokens", [30, None], ids=["thinks", "does not"])
def test_a_request_whose_answer_loops_ends(driver_for, think_tokens):
    """One token behind the fourth time, with vLLM's finish reason; it is counted."""
    driver = driver_for(**LOOP)
    job = rambler(think_tokens=think_tokens)
    if think_tokens is None:
        job = Rambler("r", (*job.prompt[:-1], WORD), None, 300)
    request = play(driver, job)
    assert request.get_finished_reason() is FinishReason.REPETITION
    assert request.stop_reason == "repetition_detected"
    behind = request.num_output_tokens - (0 if think_tokens is None else think_tokens + 1)
    assert LOOPS_FROM + SIZE * COUNT - SIZE < behind <= LOOPS_FROM + SIZE * COUNT + 1
    assert counted(driver) == {"answer_loop:enforce": 1}


def test_off_by_default_and_by_request(driver_for):
    """Thoughts alone are looked at; one request may ask for its answer."""
    driver = driver_for(**LOOP | {"EXIT__LOOP_SCOPE": "thought"})
    assert play(driver, rambler()).status is RequestStatus.FINISHED_STOPPED
    assert counted(driver) == {}
    asked = play(driver, rambler("asks"), {"meridian_loop_scope": "all"})
    assert asked.get_finished_reason() is FinishReason.REPETITION


@pytest.mark.parametrize("at_a_time", ["1", "8"])
def test_observing_ends_nothing(driver_for, at_a_time):
    """It counts each loop, measured or not."""
    observe = {"EXIT__MODE": "observe", "EXIT__OBSERVED_AT_A_TIME": at_a_time}
    driver = driver_for(**LOOP | observe)
    driver.add(thinker("first", 50))
    driver.step()
    assert play(driver, rambler()).status is RequestStatus.FINISHED_STOPPED
    # The first one's answer is one token over and over.
    assert counted(driver) == {"answer_loop:observe": 2}


def test_a_loop_that_the_answer_leaves_ends_nothing(driver_for):
    """The token behind it says something else."""
    driver = driver_for(**LOOP)
    request = play(driver, rambler(loops_for=SIZE * COUNT))
    assert request.status is RequestStatus.FINISHED_STOPPED


def test_a_check_of_the_requests_own_is_vllms(driver_for):
    """With a count that its answer does not reach."""
    driver = driver_for(**LOOP)
    own = RepetitionDetectionParams(max_pattern_size=8, min_count=1000)
    assert play(driver, rambler(), repetition_detection=own).status == (
        RequestStatus.FINISHED_STOPPED
    )
    assert counted(driver) == {}


def test_parameters_that_requests_share_stay_as_they_are(driver_for):
    """In one process the samples of a request have the same."""
    driver = driver_for(**LOOP)
    driver.add(rambler())
    shared = driver.scheduler.requests["r"].sampling_params
    driver.drain()
    assert shared.repetition_detection is None


def test_thoughts_are_closed_as_ever(driver_for):
    """Behind the close the answer is looked at by itself."""
    driver = driver_for(**LOOP)
    request = play(driver, thinker("r", 400))
    assert THINK_END in request._output_token_ids
    assert request.get_finished_reason() is FinishReason.REPETITION
    totals = driver.scheduler.phase_counters.totals
    assert totals["exit:loop"] == totals["answer_loop:enforce"] == 1


def test_an_abort_leaves_nothing(driver_for):
    """Within the answer, and its name is used again."""
    driver = driver_for(**LOOP)
    for _ in range(2):
        driver.add(rambler())
        for _ in range(45):
            driver.step()
        driver.abort("r")
        driver.drain()
    assert not driver.scheduler.early_exit.requests
    assert is_empty(driver)
