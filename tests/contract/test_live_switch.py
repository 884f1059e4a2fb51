"""Policy and early exit are switched between any two steps of the real scheduler."""

import random

import pytest
from scheduler_driver import Driver, Job, engine_config, make_prompt
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from meridian_patch.engine import wire
from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)

STEPS = 600
# A pool of 24 blocks under prompts of up to 150 tokens and outputs of up to 400 preempts often.
BLOCKS = 24


def driver_of(demo_model, *, is_async: bool = True, queue_policy: str = "fcfs") -> Driver:
    config = engine_config(
        demo_model, is_async=is_async, blocks=BLOCKS, scheduling_policy=queue_policy
    )
    build = build_async_phase_scheduler if is_async else build_phase_scheduler
    patched = build(AsyncScheduler if is_async else Scheduler)
    return Driver.build(patched, config, is_async=is_async, tiered=True)


def job(number: int, rng: random.Random, *, thinks: bool = True) -> Job:
    return Job(
        request_id=f"r{number}",
        prompt=tuple(make_prompt(rng, rng.randrange(4, 150), thinks=thinks)),
        think_tokens=rng.randrange(300) if thinks else None,
        answer_tokens=rng.randrange(100),
        priority=rng.randrange(2),
        arrival_time=float(number),
    )


@pytest.mark.parametrize("queue_policy", ["fcfs", "priority"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_switches_at_any_moment_lose_nothing(demo_model, seed, is_async, queue_policy):
    """Under pressure and with aborts, every request ends, and no hook of ours fails."""
    rng = random.Random(seed)
    driver = driver_of(demo_model, is_async=is_async, queue_policy=queue_policy)
    scheduler, arrived = driver.scheduler, 0
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for _ in range(STEPS):
        if rng.random() < 0.05:
            driver.add(job(arrived, rng, thinks=rng.random() < 0.8))
            arrived += 1
        if arrived and rng.random() < 0.01:
            driver.abort(f"r{rng.randrange(arrived)}")
        if rng.random() < 0.05:
            policy = rng.choice(("noop", "latency", None))
            scheduler.live_switch.turn(policy, rng.choice(("off", "observe", "enforce", None)))
        driver.step()
    driver.drain()
    totals = scheduler.phase_counters.totals
    assert not [event for event in totals if event.startswith(("fallback:exc", "part_off"))]
    assert {f"switched:policy {name}" for name in ("noop", "latency")} <= totals.keys()
    assert sum(number for event, number in totals.items() if event.startswith("preemption")) > 5
    assert len(scheduler.phase_tracker) == 0
    assert not scheduler.request_states.overtaken
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_requests_that_wait_by_level_go_on_in_the_order_in_which_they_came(
    demo_model, monkeypatch
):
    """Long prompts wait behind later short ones until the policy is switched off."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__PROMPT_WEIGHT", "10")
    rng = random.Random(0)
    driver = driver_of(demo_model)
    scheduler = driver.scheduler
    driver.add(Job("thinker", tuple(make_prompt(rng, 10, thinks=True)), 300, 1))
    driver.step()
    for number, tokens in enumerate((20, 600, 20, 600, 20)):
        prompt = tuple(make_prompt(rng, tokens, thinks=True))
        driver.add(Job(f"r{number}", prompt, 1, 1, arrival_time=float(number)))
    names = [request.request_id for request in scheduler.waiting]
    scheduler.live_switch.turn("noop", None)
    assert [request.request_id for request in scheduler.waiting] == sorted(names)
    assert names != sorted(names)


def test_only_what_the_engine_was_started_with(demo_model, monkeypatch):
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    switch = driver_of(demo_model).scheduler.live_switch
    with pytest.raises(ValueError, match="policy is 'latency', expected 'noop'"):
        switch.turn("latency", "enforce")
    assert switch.in_force() == {"policy": "noop", "exit": "off", "started_as": "noop"}
    assert switch.turn(None, "enforce")["exit"] == "enforce"


def test_engine_core_has_the_method_that_its_clients_call(demo_model):
    """Load-bearing: EngineCore looks utility methods up by name, and returns plain values."""
    driver = driver_of(demo_model)

    class Core:
        scheduler = driver.scheduler

    method = vars(EngineCore)[wire.SWITCH]
    assert method(Core(), "noop", None)["policy"] == "noop"
    assert method(Core(), None, None)["policy"] == "noop"
