"""What the scheduler counts of the policy: how often it acts, what that takes, and how it errs."""

import random
from functools import partial

import pytest
from scheduler_driver import Job, make_prompt
from tier_driver import SYNC_AND_ASYNC, driver_for, preempt, step_until

from meridian_patch.phase.tracker import Phase

EVENTS = ("limited_step", "policy_seconds", "step_seconds", "recomputed_tokens")


def job(name, *, prompt=60, think=60, answer=60):
    tokens = make_prompt(random.Random(name), prompt, thinks=True, shared=len(name))
    return Job(name, tuple(tokens), think, answer)


def counted(driver):
    """What was counted, by ``event:label``."""
    totals = driver.scheduler.phase_counters.totals
    return {key: number for key, number in totals.items() if key.partition(":")[0] in EVENTS}


def serve(driver):
    """Requests of all sizes beside answers."""
    for number in range(24):
        driver.add(job(f"r{number}", prompt=50 + 40 * (number % 12)))
        for _ in range(12):
            driver.step()
    driver.drain()


@pytest.mark.usefixtures("patience")
@SYNC_AND_ASYNC
def test_what_the_policy_does_is_counted(demo_model, is_async):
    """On the driver's clock predictions miss little; the policy's own time is the machine's."""
    driver = driver_for(demo_model, is_async=is_async, blocks=200, max_num_seqs=8)
    spent, spend = [], driver.scheduler.phase_counters.spend
    driver.scheduler.phase_counters.spend = lambda *args: (spent.append(args), spend(*args))
    serve(driver)
    seen = counted(driver)
    assert 0 < seen["limited_step:tokens"] < driver.steps
    for stage in ("limits", "order"):
        assert (
            sum(s for event, label, s in spent if (event, label) == ("policy_seconds", stage)) > 0
        )
    # The machine's own time is in no total: equal runs have equal totals.
    assert not [key for key in seen if key.startswith("policy_seconds")]
    assert 0 < seen["step_seconds:error"] < 0.1 * seen["step_seconds:measured"]
    assert seen["step_seconds:measured"] <= driver.now_s


def limit_steps(monkeypatch, driver, tokens, requests):
    """Every step that is planned gets these limits."""
    parts = driver.scheduler.policy_parts
    limits = {"token_budget": tokens, "max_active": requests}
    for part in (parts.cut, parts.displacing):
        monkeypatch.setattr(part, "before_schedule", partial(set_limits, limits))
    monkeypatch.setattr(parts.first, "is_uncontended", lambda: False)
    driver.scheduler._parts._find_hooks()


def set_limits(limits, plan):
    for name, value in limits.items():
        if plan.is_contended:
            setattr(plan, name, value)


def test_a_slow_step_counts_once(demo_model):
    """Although its limits and its order are two decisions, and both take too long."""
    driver = driver_for(demo_model, blocks=200, max_num_seqs=8)
    driver.scheduler.policy_parts.order.time_budget_s = 0.0
    driver.scheduler.policy_parts.order.order._time_budget_s = 0.0
    serve(driver)
    assert 0 < driver.scheduler.phase_counters.totals["fallback:slow"] <= driver.steps


def test_noop_counts_nothing_of_the_policy(demo_model, monkeypatch):
    """It decides nothing, and predicts nothing that it would use."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    driver = driver_for(demo_model, blocks=200, max_num_seqs=8)
    serve(driver)
    numbers = {key: n for key, n in counted(driver).items() if not key.startswith("recomputed")}
    assert not any(numbers.values()), numbers


@SYNC_AND_ASYNC
def test_limits_that_leave_nothing_out_are_not_counted(demo_model, monkeypatch, is_async):
    """Of a budget that was not used up, and of seats that were not taken, no one noticed."""
    driver = driver_for(
        demo_model, is_async=is_async, blocks=200, max_num_seqs=8, max_num_batched_tokens=1024
    )
    limit_steps(monkeypatch, driver, driver.scheduler.max_num_scheduled_tokens, 8)
    for number in range(4):
        driver.add(job(f"r{number}", prompt=100))
    driver.drain()
    assert not [key for key in counted(driver) if key.startswith("limited_step")]


@pytest.mark.usefixtures("patience")
def test_a_limit_of_requests_that_keeps_one_waiting_is_counted(demo_model, monkeypatch):
    """Once per step in which a request waits behind it."""
    driver = driver_for(demo_model, blocks=200, max_num_seqs=8)
    limit_steps(monkeypatch, driver, None, 1)
    for number in range(2):
        driver.add(job(f"r{number}", prompt=30, think=10, answer=10))
    driver.drain()
    seen = counted(driver)
    assert "limited_step:tokens" not in seen
    assert 0 < seen["limited_step:requests"] < driver.steps


@SYNC_AND_ASYNC
def test_tokens_never_computed_are_not_computed_again(demo_model, is_async):
    """Of a prompt that was preempted within its prefill, only the chunks that were computed."""
    driver = driver_for(demo_model, is_async=is_async, blocks=200, max_num_batched_tokens=64)
    driver.add(job("r", prompt=900))
    driver.step()
    driver.step()
    request = driver.scheduler.requests["r"]
    computed = request.num_computed_tokens
    assert 0 < computed < 400
    preempt(driver, "r")
    driver.drain()
    again = counted(driver).get("recomputed_tokens:prefill", 0)
    assert again <= computed


@SYNC_AND_ASYNC
@pytest.mark.parametrize("phase", [Phase.THINK, Phase.ANSWER])
def test_tokens_computed_again_are_counted_by_phase(demo_model, is_async, phase):
    """All that a request knew, but for what the cache still holds of it."""
    driver = driver_for(demo_model, is_async=is_async, blocks=200)
    driver.add(job("r", prompt=100))
    step_until(driver, "r", phase, tokens=40)
    assert not counted(driver).get(f"recomputed_tokens:{phase}")
    preempt(driver, "r")
    request = driver.scheduler.requests["r"]
    known, hits = request.num_tokens, driver.preempted_hits
    driver.drain()
    cached = driver.preempted_hits - hits
    assert cached > 0
    again = counted(driver)[f"recomputed_tokens:{phase}"]
    # The last token was not computed yet; one in flight arrives before the request resumes.
    assert known - 1 - cached <= again <= known - cached + 2
