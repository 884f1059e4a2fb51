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
MODES = ("off", "observe", "enforce")
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
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 4))]
)
def test_switches_at_any_moment_lose_nothing(demo_model, monkeypatch, seed, is_async, queue_policy):
    """Under pressure and with aborts, every request ends, and no hook of ours fails.

    Thoughts are closed while early exit is enforced.
    """
    bounded = {"MODE": "enforce", "MAX_THINK_TOKENS": "12", "EAT": "false", "RPDI": "false"}
    for name, value in bounded.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_EXIT__{name}", value)
    rng = random.Random(seed)
    driver = driver_of(demo_model, is_async=is_async, queue_policy=queue_policy)
    scheduler, arrived = driver.scheduler, 0
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for step in range(STEPS):
        if rng.random() < 0.05:
            driver.add(job(arrived, rng, thinks=rng.random() < 0.8))
            arrived += 1
        if arrived and rng.random() < 0.01:
            driver.abort(f"r{rng.randrange(arrived)}")
        if rng.random() < 0.05:
            scheduler.live_switch.turn(rng.choice(("noop", "latency")), None)
        if step % 100 == 99:
            scheduler.live_switch.turn(None, MODES[step // 100 % len(MODES)])
        driver.step()
    driver.drain()
    totals = scheduler.phase_counters.totals
    assert not [event for event in totals if event.startswith(("fallback:exc", "part_off"))]
    switched = {"policy noop", "policy latency", "exit off", "exit observe", "exit enforce"}
    assert {f"switched:{name}" for name in switched} <= totals.keys()
    assert totals["exit:hard_cap"] > 0
    assert sum(number for event, number in totals.items() if event.startswith("preemption")) > 5
    assert len(scheduler.phase_tracker) == 0
    assert not scheduler.request_states.overtaken
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_a_later_request_does_not_go_before_one_that_asked_for_less(demo_model):
    """Where `meridian_priority` had moved it back before the switch."""
    rng = random.Random(0)
    driver = driver_of(demo_model)
    scheduler = driver.scheduler
    driver.add(Job("thinker", tuple(make_prompt(rng, 10, thinks=True)), 300, 1))
    driver.step()
    for number in range(3):
        driver.add(job(number, rng))
        if number == 1:
            state = scheduler.request_states.get("r1")
            state.arrival = state.arrival[0] + 120, state.arrival[1]
            state.place = (0, state.arrival)
    scheduler.live_switch.turn("noop", None)
    driver.add(job(3, rng))
    assert [request.request_id for request in scheduler.waiting] == ["r0", "r1", "r2", "r3"]


def test_requests_that_wait_by_level_go_on_in_the_order_in_which_they_came(demo_model, monkeypatch):
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
    """What is refused is said, and the rest is switched."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__MODE", "observe")
    switch = driver_of(demo_model).scheduler.live_switch
    assert switch.turn("latency", "off") == {
        "rank": 0,
        "policy": "noop",
        "exit": "off",
        "started_as": "noop, observe",
        "refused": "policy is 'latency', expected 'noop'",
    }
    refused = switch.turn(None, "enforce")
    assert refused["refused"] == "exit is 'enforce', expected at most 'observe'"
    assert "refused" not in switch.turn("noop", "observe")


def test_noop_switches_off_the_rules_that_a_noop_was_given(demo_model, monkeypatch):
    """A rule of its own is the policy that the engine was started with."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__STEP_CUT", "true")
    driver = driver_of(demo_model)
    scheduler, rng = driver.scheduler, random.Random(0)
    driver.add(Job("answers", tuple(make_prompt(rng, 10, thinks=True)), 1, 300))
    for _ in range(5):
        driver.step()
    computed = []
    for policy in (None, "noop", "latency"):
        assert "refused" not in scheduler.live_switch.turn(policy, None)
        assert scheduler.live_switch.in_force()["policy"] == policy or policy is None
        name = f"to {policy}"
        driver.add(Job(name, tuple(make_prompt(rng, 100, thinks=True)), 1, 1))
        driver.step()
        computed.append(scheduler.requests[name].num_computed_tokens)
    # What the first one left is computed before the last one.
    assert computed[0] < 100 <= computed[1]
    assert computed[2] < 100


def test_the_mode_in_force_is_left_alone(demo_model, monkeypatch):
    """Thoughts under way are probed on where an operator asks for what is."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__MODE", "observe")
    scheduler = driver_of(demo_model).scheduler
    set_to = []
    monkeypatch.setattr(scheduler.early_exit, "set_mode", set_to.append)
    for mode in ("observe", "off"):
        scheduler.live_switch.turn("latency", mode)
    assert set_to == ["off"]


def test_a_policy_that_the_breaker_switched_off_stays_off(demo_model):
    """And the order in which requests wait is vLLM's, which is left alone."""
    rng = random.Random(0)
    driver = driver_of(demo_model)
    scheduler = driver.scheduler
    scheduler._switch_off(["the policy"])
    for number in range(30):
        driver.add(job(number, rng))
    before = list(scheduler.waiting)
    assert scheduler.live_switch.in_force()["policy"] == "noop"
    assert scheduler.live_switch.turn("latency", None)["refused"]
    scheduler.live_switch.turn("noop", None)
    assert list(scheduler.waiting) == before


def test_running_requests_go_back_to_the_order_of_admission(demo_model, monkeypatch):
    """The next victim is stock's: the one that was admitted last."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__LEVEL_TOKENS", "8")
    rng = random.Random(0)
    driver = driver_of(demo_model)
    scheduler = driver.scheduler
    for number in range(5):
        prompt = tuple(make_prompt(rng, 20 + 30 * (number % 2), thinks=number != 4))
        driver.add(Job(f"r{number}", prompt, None if number == 4 else 150, 100))
        driver.step()
    driver.add(Job("long", tuple(make_prompt(rng, 150, thinks=True)), 1, 1))
    for _ in range(12):
        driver.step()
    admitted = [f"r{number}" for number in range(5)]
    in_order = [name for name in admitted if name in scheduler.requests]
    running = [request.request_id for request in scheduler.running if request.request_id != "long"]
    assert running != in_order
    scheduler.live_switch.turn("noop", None)
    running = [request.request_id for request in scheduler.running if request.request_id != "long"]
    assert running == in_order


def test_what_clients_ask_for_while_it_is_off_has_no_effect_later(demo_model):
    """The body's `priority` counts under vLLM's own priority policy alone."""
    driver = driver_of(demo_model)
    driver.scheduler.live_switch.turn("noop", None)
    driver.add(Job("r", tuple(range(10, 20)), None, 5, priority=-1000))
    assert driver.scheduler.requests["r"].priority == 0


def test_engine_core_has_the_method_that_its_clients_call(demo_model):
    """Load-bearing: EngineCore looks utility methods up by name, and returns plain values."""
    driver = driver_of(demo_model)

    class Core:
        scheduler = driver.scheduler

    method = vars(EngineCore)[wire.SWITCH]
    assert method(Core(), "noop", None)["policy"] == "noop"
    assert method(Core(), None, None)["policy"] == "noop"
