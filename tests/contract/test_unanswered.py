"""Requests that end in their thought, on the real scheduler: reported and counted."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
from exit_driver import exit_driver, is_empty, thinker, told
from scheduler_driver import TURN_END, Job

OBSERVE = {"EXIT__MODE": "observe"}


@dataclass(frozen=True)
class Quitter(Job):
    """A model that ends its turn in its thought."""

    def token(self, index):
        return TURN_END if index == 60 else super().token(index)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def driver_for(request, monkeypatch, demo_model):
    return partial(exit_driver, monkeypatch, demo_model, is_async=request.param)


def play(driver, *jobs, fields=None):
    """The last report of each request."""
    reports = told(driver)
    for job in jobs:
        driver.add(job, fields)
    driver.drain()
    assert is_empty(driver)
    return {name: each[-1] for name, each in reports.items()}


def counted(driver):
    totals = driver.scheduler.phase_counters.totals
    return {name: n for name, n in totals.items() if name.startswith("unanswered:")}


JOBS = {
    "length": (thinker("r", 10_000, max_tokens=60), 60),
    "stop": (Quitter("r", thinker("r").prompt, 10_000, 0), 61),
}


@pytest.mark.parametrize("why", JOBS)
@pytest.mark.parametrize("settings", [OBSERVE, OBSERVE | {"EXIT__OBSERVED_AT_A_TIME": "1"}, {}])
def test_a_request_that_ends_in_its_thought_is_unanswered(driver_for, why, settings):
    """Measured or not: its reason and its tokens are reported, and its end is counted."""
    job, tokens = JOBS[why]
    is_sampled = "EXIT__OBSERVED_AT_A_TIME" in settings
    # One that is measured first, and answers.
    jobs = [thinker("first", 100)] * is_sampled
    driver = driver_for(**settings, EXIT__EAT="false", EXIT__RPDI="false")
    outcome, think_tokens, *_ = play(driver, *jobs, job)["r"]
    assert (outcome.reason, outcome.think_tokens, think_tokens) == ("unanswered", tokens, tokens)
    assert outcome.is_measured != is_sampled
    assert counted(driver) == {f"unanswered:{why}": 1}
    totals = driver.scheduler.phase_counters.totals
    assert totals["exit:unanswered"] == 1
    assert totals["think_tokens:unanswered"] == tokens


def test_what_would_have_closed_it_is_reported(driver_for):
    """And what that would have saved is counted."""
    driver = driver_for(**OBSERVE)
    outcome = play(driver, JOBS["length"][0])["r"].outcome
    assert outcome.reason == "unanswered"
    assert outcome.verdict.reason == "eat"
    saved = driver.scheduler.phase_counters.totals["estimated_saved:observe"]
    assert saved == 60 - outcome.verdict.close_at > 0


def test_an_answer_that_is_cut_short_is_one(driver_for):
    """As is a request that never thought; neither is counted."""
    driver = driver_for(**OBSERVE)
    plain = Job("plain", (*thinker("p").prompt[:-1], 65), None, 100, max_tokens=20)
    play(driver, thinker("r", 30, max_tokens=40), plain)
    assert counted(driver) == {}


def test_the_second_thought_counts_alone(driver_for):
    """Behind an answer, which the client has got, the request may end in a thought, too."""

    @dataclass(frozen=True)
    class Again(Job):
        def token(self, index):
            return 256 if index == 50 else super().token(index)

    driver = driver_for(**OBSERVE)
    reports = play(driver, Again("r", thinker("r").prompt, 30, 200, max_tokens=70))
    outcome, think_tokens, *_ = reports["r"]
    assert (outcome.reason, outcome.think_tokens, think_tokens) == ("unanswered", 19, 31 + 19)
    assert counted(driver) == {"unanswered:length": 1}


def test_aborts_and_sessions_are_not_counted(driver_for):
    """A client that left wants no answer, and a session may go on with its thought."""
    driver = driver_for(**OBSERVE)
    driver.add(thinker("gone", 10_000))
    driver.send_chunk(replace(JOBS["length"][0], request_id="s"))
    for _ in range(100):
        driver.step()
    driver.abort(["gone", "s"])
    driver.drain()
    assert is_empty(driver)
    assert counted(driver) == {}
    assert "exit:unanswered" not in driver.scheduler.phase_counters.totals
