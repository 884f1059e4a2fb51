"""A part that always fails is switched off, and requests go on as in stock."""

import gc
import weakref

import pytest
from exit_driver import exit_driver, thinker

from meridian_patch.engine.scheduler import guard, scheduler
from meridian_patch.engine.scheduler.guard import MOST_FAILED_STEPS, WATCHED_STEPS, StepGuard
from meridian_patch.telemetry.counters import PARTS, PhaseCounters

# What each part of an engine without a role is made to fail in: a call that comes in every step.
FAILS_IN = {
    "the phase tracker": lambda scheduler: (scheduler.phase_tracker, "expects"),
    "the policy": lambda scheduler: (scheduler.policy_parts.load, "of"),
    "the KV tiers": lambda scheduler: (scheduler.kv_tiers, "_requests"),
    "early exit": lambda scheduler: (scheduler.early_exit, "arrange"),
}


class Failing:
    """Raises whatever is done with it."""

    def __call__(self, *_args, **_kwargs):
        raise RuntimeError("always fails")

    def __bool__(self):
        raise RuntimeError("always fails")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("part", FAILS_IN)
def test_a_part_that_always_fails_is_switched_off(monkeypatch, demo_model, part, is_async):
    """After the stated number of steps; one metric, one line of status, and all is served."""
    published = []
    monkeypatch.setattr(scheduler.status, "publish", lambda **facts: published.append(facts))
    logged = []
    monkeypatch.setattr(guard.logger, "error", lambda text, *_args, **_: logged.append(text))
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, tiered=True)
    for number in range(6):
        driver.add(thinker(f"r{number}", 120 + number))
    owner, name = FAILS_IN[part](driver.scheduler)
    monkeypatch.setattr(owner, name, Failing())
    totals = driver.scheduler.phase_counters.totals
    for _ in range(MOST_FAILED_STEPS + 2):
        driver.step()
    assert totals[f"part_off:{part}"] == 1
    off = published[-1]["parts_off"]
    assert part in off
    # The others ask the tracker, so they are off with it.
    assert len(off) == (len(FAILS_IN) if part == "the phase tracker" else 1)
    assert totals["fallback:exception"] in range(MOST_FAILED_STEPS, MOST_FAILED_STEPS + 3)
    assert sum("this step runs as stock" in text for text in logged) == 1
    assert sum("is off until the next start" in text for text in logged) == 1
    before = totals["fallback:exception"]
    driver.add(thinker("late", 120), extra_args={"meridian_priority": 1})
    driver.drain()
    assert not len(driver.scheduler.request_states)
    assert all(len(steps) > 120 for steps in driver.deliveries.values())
    assert not driver.scheduler.requests
    assert totals["fallback:exception"] == before
    pool = driver.scheduler.kv_cache_manager.block_pool
    assert pool.num_gpu_blocks - 1 == pool.get_num_free_blocks()
    if part != "early exit":
        return
    assert driver.scheduler.early_exit is None
    assert driver.scheduler.get_request_counts() == (0, 0)


@pytest.mark.parametrize("part", FAILS_IN)
def test_a_part_that_is_off_keeps_no_request(monkeypatch, demo_model, part):
    """Its tables are emptied, and no request that it followed counts as live for ever."""
    monkeypatch.setattr(guard.logger, "error", lambda *_args, **_: None)
    driver = exit_driver(monkeypatch, demo_model, tiered=True)
    for number in range(6):
        driver.add(thinker(f"r{number}", 120 + number), extra_args={"meridian_priority": 1})
    # Not with `monkeypatch`, which would keep what it changes.
    owner, name = FAILS_IN[part](driver.scheduler)
    setattr(owner, name, Failing())
    del owner
    for _ in range(MOST_FAILED_STEPS + 2):
        driver.step()
    assert driver.scheduler.phase_counters.totals[f"part_off:{part}"] == 1
    requests = [weakref.ref(request) for request in driver.scheduler.requests.values()]
    assert len(requests) >= 6
    driver.drain()
    gc.collect()
    assert not any(request() for request in requests)
    assert set(driver.scheduler.phase_tracker.counts.values()) == {0}


def test_a_part_that_fails_while_it_is_switched_off_with_the_tracker(monkeypatch, demo_model):
    """Its own limit is reached by that, when all parts are off already."""
    driver = exit_driver(monkeypatch, demo_model)
    for number in range(6):
        driver.add(thinker(f"r{number}", 120 + number))
    scheduler = driver.scheduler
    monkeypatch.setattr(scheduler.phase_tracker, "expects", Failing())
    driver.step()
    monkeypatch.setattr(scheduler.early_exit, "arrange", Failing())
    monkeypatch.setattr(scheduler.early_exit.probes, "cancel_all", Failing())
    driver.drain()
    totals = scheduler.phase_counters.totals
    assert sorted(scheduler._parts.off) == sorted({*scheduler._parts.off})
    assert totals["part_off:the phase tracker"] == totals["part_off:early exit"] == 1
    assert all(len(steps) > 120 for steps in driver.deliveries.values())


def test_failures_far_apart_switch_nothing_off():
    """One in every twenty steps for a long time is counted, and no more."""
    watching = StepGuard(PhaseCounters())
    watching.watch(["the policy"])
    for step in range(20 * MOST_FAILED_STEPS * 3):
        assert watching.new_step() == []
        if step % 20 == 0:
            with watching.protect("the policy"):
                raise RuntimeError("now and then")
    assert WATCHED_STEPS < 20 * MOST_FAILED_STEPS


def test_wrong_requests_switch_nothing_off():
    """A request with wrong options is served without them, and switches no part off."""
    watching = StepGuard(PhaseCounters())
    watching.watch(PARTS)
    for _ in range(3 * MOST_FAILED_STEPS):
        assert watching.new_step() == []
        with watching.protect("reading vllm_xargs", "hostile"):
            raise ValueError("no such field")
