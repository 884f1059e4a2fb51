"""Step cut and time-sharing on vLLM's real scheduler; each fails when switched off."""

import itertools
import random

import pytest
from plan_watch import watch_plans
from scheduler_driver import BLOCK_SIZE, STEP_S, TOKEN_S, Job, make_prompt
from tier_driver import SYNC_AND_ASYNC, driver_for, preempt, step_until
from vllm.v1.core.sched.interface import PauseState

from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.engine.upstream import is_release
from meridian_patch.phase.tracker import Phase

BUDGET = 512


@pytest.fixture
def policy(monkeypatch):
    """Sets ``policy.*`` for the drivers that the test builds."""

    def set_policy(**values):
        for name, value in values.items():
            monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name.upper()}", str(value).lower())

    set_policy(time_budget_us=10_000_000)
    return set_policy


def job(name, seed, *, prompt=60, think=50, answer=20, **more):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer, **more)


def steps_with_answers(driver, limit=2000):
    """Decode rows and prefill tokens of each step in which a request answers."""
    scheduler = driver.scheduler
    seen = []
    while scheduler.has_unfinished_requests() and limit:
        limit -= 1
        is_read = scheduler.phase_tracker.counts[Phase.ANSWER] > 0
        output = driver.step()
        if is_read and output.num_scheduled_tokens:
            seen.append(max(output.num_scheduled_tokens.values()))
    return seen


def learn(driver):
    """Serve requests of all sizes, so that the step-time model knows this machine."""
    for number in range(12):
        driver.add(job(f"lesson{number}", number, prompt=50 + 40 * number, think=20, answer=5))
        driver.drain()


@SYNC_AND_ASYNC
@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_prefill_beside_an_answer_keeps_the_step_short(demo_model, policy, is_async, is_on):
    """A long prompt comes in pieces while a request answers; without the rule in one go."""
    policy(step_cut=is_on, answer_itl_ms=20.0)
    driver = driver_for(
        demo_model, is_async=is_async, blocks=200, max_num_batched_tokens=BUDGET, max_num_seqs=8
    )
    learn(driver)
    driver.add(job("reader", 50, think=5, answer=300))
    step_until(driver, "reader", Phase.ANSWER)
    driver.add(job("long", 51, prompt=1400, think=5, answer=5))
    largest = max(steps_with_answers(driver))
    in_time = (0.020 - STEP_S) / TOKEN_S
    if is_on:
        assert 0.5 * in_time < largest < 1.3 * in_time
    else:
        assert largest > 2 * in_time
    assert not driver.scheduler.phase_counters.totals.get("fallback:exception")


def test_a_seeded_prompt_comes_whole_on_a_cpu(demo_model, policy):
    """The CPU build's runner dies of a chunk of it; when it is gone chunks are back."""
    policy(answer_itl_ms=20.0)
    driver = driver_for(demo_model, blocks=200, max_num_batched_tokens=BUDGET, max_num_seqs=8)
    learn(driver)
    driver.add(job("reader", 50, think=5, answer=300))
    step_until(driver, "reader", Phase.ANSWER)
    driver.add(job("seeded", 51, prompt=400, think=5, answer=5), seed=7)
    assert max(driver.step().num_scheduled_tokens.values()) == 400
    while "seeded" in driver.scheduler.requests:
        driver.step()
    driver.add(job("long", 52, prompt=400, think=5, answer=5))
    assert max(driver.step().num_scheduled_tokens.values()) < 400


@pytest.mark.parametrize(
    ("cadence", "own"),
    [
        (1, 1),
        (8, 1),
        pytest.param(
            1, 8, marks=pytest.mark.skipif(not is_release("0.33"), reason="vLLM's from 0.33 on")
        ),
    ],
    ids=["none", "engine core's", "scheduler's own"],
)
def test_a_lone_prompt_beside_a_reader_ends_in_bounded_time(demo_model, policy, cadence, own):
    """At any prefill cadence: three times what stock takes."""
    seconds = {}
    for name in ("noop", "latency"):
        policy(name=name)
        driver = driver_for(
            demo_model, blocks=200, max_num_batched_tokens=BUDGET, prefill_schedule_interval=own
        )
        learn(driver)
        driver.add(job("reader", 50, think=5, answer=600))
        step_until(driver, "reader", Phase.ANSWER, 10)
        throttles = itertools.cycle([False, *[True] * (cadence - 1)])
        schedule = driver.scheduler.schedule
        driver.scheduler.schedule = lambda each=schedule, turns=throttles: each(next(turns))
        driver.add(job("long", 51, prompt=1900, think=5, answer=5))
        begun_s = driver.now_s
        while not driver.deliveries["long"]:
            driver.step()
        seconds[name] = driver.now_s - begun_s
    assert seconds["latency"] <= 3.1 * seconds["noop"]


@pytest.mark.skipif(not is_release("0.33"), reason="vLLM has this cadence from 0.33 on")
def test_the_schedulers_own_cadence_is_known_before_the_step(demo_model, policy):
    """A step that may compute no prompts has none, and no more steps are taken for such."""
    policy(answer_itl_ms=20.0)
    driver = driver_for(
        demo_model, blocks=200, max_num_batched_tokens=BUDGET, prefill_schedule_interval=4
    )
    learn(driver)
    driver.add(job("reader", 50, think=5, answer=600))
    step_until(driver, "reader", Phase.ANSWER, 10)
    driver.add(job("long", 51, prompt=1900, think=5, answer=5))
    watch, steps = watch_plans(driver.scheduler), []
    while not driver.deliveries["long"]:
        tokens = driver.step().num_scheduled_tokens
        steps.append((watch.plan.may_prefill, "long" in tokens))
    # The step in which the prompt waits for its turn first, and the one that decodes after it.
    assert all(may == has for may, has in steps[1:-1])
    assert steps.count((False, False)) >= 6


@SYNC_AND_ASYNC
def test_an_answer_that_waits_alone_is_held_up_by_no_cut(demo_model, policy, is_async):
    """No other answer is read: a cut would only lengthen the prompt that it waits for."""
    policy(answer_itl_ms=20.0)
    driver = driver_for(
        demo_model,
        is_async=is_async,
        blocks=200,
        max_num_batched_tokens=BUDGET,
        long_prefill_token_threshold=200,
    )
    learn(driver)
    driver.add(job("reader", 50, think=5, answer=300))
    step_until(driver, "reader", Phase.ANSWER)
    driver.add(job("long", 51, prompt=1900, think=5, answer=5))
    for _ in range(3):
        driver.step()
    preempt(driver, "reader")
    for _ in range(2):
        if "reader" in driver.step().num_scheduled_tokens:
            break
    assert driver.scheduler.requests["reader"] in driver.scheduler.running
    assert driver.scheduler.requests["long"].is_prefill_chunk


def test_no_step_is_cut_while_no_request_answers(demo_model, policy):
    """Thinking alone: prompts take the engine's whole budget."""
    policy(answer_itl_ms=11.0)
    driver = driver_for(demo_model, blocks=200, max_num_batched_tokens=BUDGET)
    learn(driver)
    driver.add(job("thinker", 50, think=400, answer=5))
    step_until(driver, "thinker", Phase.THINK)
    driver.add(job("long", 51, prompt=1400, think=400, answer=5))
    largest = max(max(driver.step().num_scheduled_tokens.values()) for _ in range(5))
    assert largest >= BUDGET - 1


def test_a_requests_own_target_counts(demo_model, policy):
    """The tightest of those who read: a request may ask for more than the configuration."""
    policy(answer_itl_ms=40.0)
    largest = {}
    for name, wish in (("own", {"meridian_itl_ms": 15.0}), ("none", None)):
        driver = driver_for(demo_model, blocks=200, max_num_batched_tokens=BUDGET)
        learn(driver)
        driver.add(job("reader", 50, think=5, answer=300), extra_args=wish)
        step_until(driver, "reader", Phase.ANSWER)
        driver.add(job("long", 51, prompt=1400, think=5, answer=5))
        largest[name] = max(steps_with_answers(driver))
    assert largest["own"] < 1.3 * (0.015 - STEP_S) / TOKEN_S < largest["none"] / 2


def test_a_target_without_end_switches_no_rule_off(demo_model, policy):
    """About the largest number there is: prompts beside it are not cut, and no step fails."""
    policy(answer_itl_ms=20.0)
    driver = driver_for(demo_model, blocks=200, max_num_batched_tokens=BUDGET)
    learn(driver)
    driver.add(job("reader", 50, think=5, answer=300), extra_args={"meridian_itl_ms": 1.7e308})
    step_until(driver, "reader", Phase.ANSWER)
    driver.add(job("long", 51, prompt=1400, think=5, answer=5))
    assert max(steps_with_answers(driver)) > BUDGET // 2
    assert not driver.scheduler.phase_counters.totals.get("fallback:exception")


@pytest.mark.usefixtures("past_the_check")
def test_a_wrong_wish_is_logged_and_the_request_served(demo_model, policy, caplog):
    driver = driver_for(demo_model)
    driver.add(job("r", 1, think=5, answer=5), extra_args={"meridian_itl_ms": -1.0})
    driver.drain()
    assert driver.deliveries["r"]
    totals = driver.scheduler.phase_counters.totals
    assert totals["ignored_field:meridian_itl_ms"] == 1
    assert "fallback:exception" not in totals


@SYNC_AND_ASYNC
@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_newcomer_takes_the_place_of_a_long_thinker(demo_model, policy, is_async, is_on):
    """It answers at once, the thinker goes on later; without the rule the newcomer waits."""
    policy(time_sharing=is_on, level_tokens=200)
    blocks = 40
    driver = driver_for(demo_model, is_async=is_async, blocks=blocks, max_num_batched_tokens=BUDGET)
    learn(driver)
    driver.add(job("long", 50, prompt=60, think=700, answer=5))
    driver.add(job("other", 51, prompt=60, think=500, answer=5))
    step_until(driver, "long", Phase.THINK, 290)
    prompt = BLOCK_SIZE * (blocks - 22)
    driver.add(job("new", 52, prompt=prompt, think=2, answer=3))
    while not driver.deliveries["new"]:
        driver.step()
    has_waited = "other" not in driver.scheduler.requests
    driver.drain()
    assert has_waited is not is_on
    assert [len(driver.deliveries[name]) for name in ("long", "other", "new")] == [707, 507, 7]
    assert find_faults(driver.scheduler.kv_cache_manager.block_pool) == []


def test_a_paused_scheduler_displaces_no_request(demo_model, policy):
    """It would admit no request in the place of the one that made room."""
    policy(time_sharing=True, level_tokens=200)
    blocks = 40
    driver = driver_for(demo_model, blocks=blocks, max_num_batched_tokens=BUDGET)
    learn(driver)
    driver.add(job("long", 50, prompt=60, think=700, answer=5))
    driver.add(job("other", 51, prompt=60, think=500, answer=5))
    step_until(driver, "long", Phase.THINK, 290)
    driver.add(job("new", 52, prompt=BLOCK_SIZE * (blocks - 22), think=2, answer=3))
    driver.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(50):
        driver.step()
    assert not driver.scheduler.phase_counters.totals.get("preemption:think")
    driver.scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.drain()
    assert driver.scheduler.phase_counters.totals["preemption:think"] == 1


@SYNC_AND_ASYNC
def test_no_request_starves(demo_model, policy, is_async):
    """Newcomers without end: a request that made room is back some time after aging_s.

    That is when it stands before all newcomers, and those who run have made room for it.
    """
    policy(level_tokens=50, aging_s=2.0)
    driver = driver_for(demo_model, is_async=is_async, blocks=24, max_num_batched_tokens=BUDGET)
    learn(driver)
    rng = random.Random(0)
    away_since, longest_s, number = {}, 0.0, 0
    for step in range(6000):
        if step % 25 == 0:
            number += 1
            driver.add(job(f"r{number}", number, think=rng.choice((20, 300)), answer=10))
        preempted = driver.step().preempted_req_ids or ()
        running = {request.request_id for request in driver.scheduler.running}
        for name in list(away_since):
            if name in running:
                longest_s = max(longest_s, driver.now_s - away_since.pop(name))
        away_since |= {name: driver.now_s for name in preempted if name not in running}
    assert longest_s > 0
    longest_s = max([longest_s, *(driver.now_s - since for since in away_since.values())])
    assert longest_s < 2.0 + 12.0
