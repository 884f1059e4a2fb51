"""What the levels learn from requests, and that they let no request starve."""

import random

import pytest
from scheduler_driver import THINK_START, Job, make_prompt
from tier_driver import driver_for, step_until
from vllm.v1.request import RequestStatus

from meridian_patch.phase.tracker import Phase

SYNC_AND_ASYNC = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
PAUSED = RequestStatus.WAITING_FOR_STREAMING_REQ


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name, value in {"time_budget_us": "10000000", "level_tokens": "200"}.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name.upper()}", value)


def job(name, seed, *, prompt=60, think=50, answer=20, **more):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer, **more)


def known(driver):
    """What the levels know: tokens of thoughts, and how many of these ended."""
    levels = driver.scheduler.policy_parts.levels
    return levels._tokens.sum(), levels._ends.sum()


@SYNC_AND_ASYNC
def test_a_thought_counts_once(demo_model, is_async):
    """Its tokens, the end marker among them, and its end; reviews do not count them again."""
    driver = driver_for(demo_model, is_async=is_async, blocks=60)
    driver.add(job("r", 1, think=300))
    for _ in range(250):
        driver.step()
        driver.scheduler.policy_parts.review.review()
    tokens, ends = known(driver)
    assert 200 < tokens <= 250
    assert ends == 0
    driver.drain()
    assert known(driver) == (301, 1)


@SYNC_AND_ASYNC
def test_each_turn_of_a_session_counts_once(demo_model, is_async):
    driver = driver_for(demo_model, is_async=is_async, blocks=60)
    session = driver.send_chunk(job("s", 1, think=100, answer=5))
    for think, counted in ((100, (101, 1)), (60, (162, 2))):
        if think == 60:
            driver.send_chunk(job("s", 2, think=60, answer=5, prompt=30))
            driver.step()
        while session.status != PAUSED:
            driver.step()
        assert known(driver) == counted
    driver.abort("s")
    assert known(driver) == (162, 2)


def test_a_thought_that_is_cut_ends_and_one_that_is_aborted_does_not(demo_model):
    """The first gives its place back as the others do."""
    driver = driver_for(demo_model, blocks=60)
    driver.add(job("cut", 1, think=400, max_tokens=300))
    driver.drain()
    assert known(driver) == (300, 1)
    driver.add(job("aborted", 2, think=400))
    step_until(driver, "aborted", Phase.THINK, 100)
    driver.abort("aborted")
    driver.drain()
    tokens, ends = known(driver)
    assert 400 <= tokens <= 403
    assert ends == 1


def test_a_thought_that_opens_again_goes_on(demo_model):
    """Its tokens count from where the first ended."""
    driver = driver_for(demo_model, blocks=60)
    driver.add(job("r", 1, think=300, answer=200, opening=(66, THINK_START) + (65,) * 10))
    driver.drain()
    tokens, ends = known(driver)
    assert ends == 2
    assert 301 < tokens < 520


@SYNC_AND_ASYNC
def test_a_thinker_that_is_displaced_again_and_again_gets_on(demo_model, monkeypatch, is_async):
    """By one client, each time as soon as the thinker is back: it thinks in between."""
    for name, value in {"level_tokens": 50, "prompt_weight": 0, "aging_s": 1.0}.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name.upper()}", str(value))
    driver = driver_for(
        demo_model, is_async=is_async, blocks=60, max_num_batched_tokens=256, max_num_seqs=2
    )
    for number in range(12):
        driver.add(job(f"lesson{number}", number, prompt=50 + 40 * number, think=20, answer=5))
        driver.drain()
    driver.add(job("long", 50, prompt=1000, think=600, answer=5))
    step_until(driver, "long", Phase.THINK, 400)
    began_s, sent, due, times = driver.now_s, 0, 0, 0
    name = None
    while "long" in driver.scheduler.requests:
        if name is not None and name not in driver.scheduler.requests:
            name, due = None, driver.steps + 2
        if name is None and driver.steps >= due:
            sent += 1
            name = f"n{sent}"
            driver.add(job(name, 1000 + sent, prompt=700, think=10, answer=3))
        output = driver.step()
        times += "long" in (output.preempted_req_ids or ())
        assert times < 40
    assert driver.now_s - began_s < 15
