"""The real scheduler under KV pressure: who is preempted, who resumes, what a failure costs."""

import itertools
import logging
import random

import pytest
from scheduler_driver import Driver, Job, engine_config, make_prompt
from tier_driver import ASYNC_AND_NIGHTLY_SYNC
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.phase.tracker import Phase

BLOCKS = 40


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy test machine must not run into the policy's time budget."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US", "10000000")


def driver_for(demo_model, *, is_async=False, queue_policy="fcfs", blocks=BLOCKS):
    config = engine_config(
        demo_model, is_async=is_async, blocks=blocks, scheduling_policy=queue_policy
    )
    build = build_async_phase_scheduler if is_async else build_phase_scheduler
    return Driver.build(build(AsyncScheduler if is_async else Scheduler), config, is_async=is_async)


def load(driver, seed, requests=40, thinks=True, longest_answer=60):
    """Requests that arrive every few steps; together they want twice the pool, answers a part."""
    rng = random.Random(seed)
    for number in range(requests):
        driver.add(
            Job(
                f"r{number}",
                tuple(make_prompt(rng, rng.randrange(10, 120), thinks=thinks, shared=number)),
                rng.randrange(20, 300) if thinks else None,
                rng.randrange(20, longest_answer),
                arrival_time=float(number),
            )
        )
        for _ in range(rng.randrange(12)):
            driver.step()
    driver.drain()
    return driver.scheduler.phase_counters.totals


def longest_answer_gap(driver):
    """Steps between two answer tokens of one request, at worst."""
    worst = 0
    for request_id, steps in driver.deliveries.items():
        answer = steps[(driver.jobs[request_id].think_tokens or 0) + 1 :]
        worst = max([worst, *(b - a for a, b in itertools.pairwise(answer))])
    return worst


@pytest.mark.parametrize("queue_policy", ["fcfs", "priority"])
@ASYNC_AND_NIGHTLY_SYNC
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_thinkers_make_room_and_answers_stay(demo_model, is_async, queue_policy, seed):
    """Under pressure only thinkers and prefill are preempted, and answers never pause."""
    driver = driver_for(demo_model, is_async=is_async, queue_policy=queue_policy)
    totals = load(driver, seed)
    assert totals.get("preemption:think", 0) > 5
    assert totals.get("preemption:answer", 0) == 0
    assert longest_answer_gap(driver) <= 2
    assert len(driver.scheduler.phase_tracker) == 0
    assert not driver.scheduler.request_states.waiting_answers
    assert all(
        len(driver.deliveries[job.request_id]) == job.think_tokens + job.answer_tokens + 2
        for job in driver.jobs.values()
    )


@pytest.mark.parametrize("queue_policy", ["fcfs", "priority"])
def test_noop_preempts_answers_under_the_same_load(monkeypatch, demo_model, queue_policy):
    """The same load under stock order does preempt answers: the test above can fail."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    driver = driver_for(demo_model, queue_policy=queue_policy)
    totals = load(driver, seed=1)
    assert totals["preemption:answer"] > 0
    assert longest_answer_gap(driver) > 10


def test_no_reasoning_traffic_means_stock_decisions(monkeypatch, demo_model):
    """Without think traffic the latency policy gives every token in the step stock gives it."""
    patched = driver_for(demo_model)
    load(patched, seed=4, thinks=False)
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    stock = driver_for(demo_model)
    totals = load(stock, seed=4, thinks=False)
    assert totals["preemption:answer"] > 0
    assert patched.deliveries == stock.deliveries


@ASYNC_AND_NIGHTLY_SYNC
def test_an_answer_is_preempted_only_when_no_other_is_left(demo_model, is_async):
    """Long answers outgrow the pool: each preempted answer was among answers only."""
    driver = driver_for(demo_model, is_async=is_async)
    scheduler, preempt = driver.scheduler, driver.scheduler._preempt_request
    company = []

    def watch(request, *args, **kwargs):
        phases = {scheduler.phase_tracker.get(r.request_id).phase for r in scheduler.running}
        if scheduler.phase_tracker.get(request.request_id).phase is Phase.ANSWER:
            company.append(phases)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = watch
    for seed in (1, 2, 3):
        load(driver, seed, longest_answer=300)
    assert len(company) > 3
    assert set().union(*company) <= {Phase.ANSWER}


@ASYNC_AND_NIGHTLY_SYNC
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_passing_over_quiet_steps_changes_nothing(demo_model, monkeypatch, is_async, seed):
    """With every step planned and ordered, each token comes in the same step."""
    # Its cuts depend on what steps take here.
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__STEP_CUT", "false")
    busy = driver_for(demo_model, is_async=is_async)
    busy.scheduler.policy_parts.first.is_uncontended = lambda: False
    totals = load(busy, seed)
    driver = driver_for(demo_model, is_async=is_async)
    scheduler, quiet = driver.scheduler, []
    is_uncontended = scheduler.policy_parts.first.is_uncontended

    def note():
        if is_quiet := is_uncontended():
            quiet.append(len(scheduler.running))
        return is_quiet

    scheduler.policy_parts.first.is_uncontended = note
    assert load(driver, seed) == totals
    assert driver.deliveries == busy.deliveries
    assert totals["preemption:think"] > 5
    assert len(quiet) > 100
    assert max(quiet) > 3


@ASYNC_AND_NIGHTLY_SYNC
def test_probes_make_room_before_all_requests(demo_model, monkeypatch, is_async):
    """A probe under way is preempted before a thinker, and long before an answer.

    With its sample on the way that takes nothing from it.
    """
    settings = {
        "MODE": "observe",
        "PROBE_MIN_GAP_TOKENS": "1",
        "PROBE_MAX_GAP_TOKENS": "2",
        "PROBE_EVERY_STEPS": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_EXIT__{name}", value)
    driver = driver_for(demo_model, is_async=is_async)
    scheduler, preempt = driver.scheduler, driver.scheduler._preempt_request
    behind, displaced, ends = [], set(), {}

    def watch(request, *args, **kwargs):
        if isinstance(request, ProbeRequest):
            displaced.add(request.request_id)
        else:
            behind.append(sum(isinstance(each, ProbeRequest) for each in scheduler.running))
        preempt(request, *args, **kwargs)

    free = scheduler._free_request

    def watch_end(request, *args, **kwargs):
        if isinstance(request, ProbeRequest):
            ends[request.request_id] = request.status
        return free(request, *args, **kwargs)

    scheduler._preempt_request = watch
    scheduler._free_request = watch_end
    for seed in (1, 2, 3):
        load(driver, seed, longest_answer=300)
    assert scheduler.early_exit.probes.num_probes > 100
    assert len(behind) > 20
    assert not any(behind)
    # Without async scheduling a sample is not on the way between steps.
    if is_async:
        assert len(displaced) > 100
        measured = [ends[name] is RequestStatus.FINISHED_LENGTH_CAPPED for name in displaced]
        # The others' parents ended their thoughts with the same step.
        assert sum(measured) >= 0.9 * len(measured)


def test_last_resort_preempts_an_answer_and_resumes_it_first(demo_model):
    """With answers alone in the pool one must go; it resumes before the thinkers that wait."""
    driver = driver_for(demo_model, blocks=14)
    rng = random.Random(0)
    for number in range(3):
        prompt = tuple(make_prompt(rng, 60, thinks=True, shared=number))
        driver.add(Job(f"answer{number}", prompt, 2, 200))
    for _ in range(40):
        driver.step()
    for number in range(4):
        prompt = tuple(make_prompt(rng, 60, thinks=True, shared=10 + number))
        driver.add(Job(f"thinker{number}", prompt, 200, 5))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert totals["preemption:answer"] > 0
    last_answer = max(driver.deliveries[f"answer{n}"][-1] for n in range(3))
    last_thinker = max(driver.deliveries[f"thinker{n}"][-1] for n in range(4))
    assert last_answer < last_thinker


class BrokenPolicy:
    def rank(self, view):
        if view.phase is Phase.THINK:
            raise RuntimeError("no rank today")
        return 0, 0


def test_a_failing_policy_costs_a_count_and_nothing_else(demo_model, caplog):
    """An exception in the policy is counted per step, logged with the request, run as stock."""
    driver = driver_for(demo_model)
    driver.scheduler.policy_parts.order.order._policy = BrokenPolicy()
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        totals = load(driver, seed=1, requests=8)
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert 0 < totals["fallback:exception"] <= driver.steps
    assert "the policy failed for request r0; this step runs as stock" in caplog.text
    assert "no rank today" in caplog.text


def test_a_failing_tracker_costs_a_count_and_nothing_else(demo_model):
    """An exception in the tracker leaves the request's tokens alone."""
    driver = driver_for(demo_model)

    def fail(*_):
        raise RuntimeError("lost")

    driver.scheduler.phase_tracker.observe = fail
    totals = load(driver, seed=1, requests=8)
    assert totals["fallback:exception"] > 0
    assert all(driver.deliveries.values())


def test_a_slow_policy_is_dropped_for_the_step(monkeypatch, demo_model):
    """An order that took longer than its time budget is not used, and that is counted."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US", "50")
    # It displaces thinkers alone, whatever the order is.
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_SHARING", "false")
    driver = driver_for(demo_model)
    clock = iter(range(10**9))
    monkeypatch.setattr(
        "meridian_patch.engine.scheduler.running_order.time.perf_counter", lambda: next(clock)
    )
    totals = load(driver, seed=1)
    assert totals["fallback:slow"] > 0
    assert totals["preemption:answer"] > 0


def test_aborts_in_every_phase_leave_nothing_behind(demo_model):
    """Requests aborted while waiting, thinking, answering or preempted are forgotten."""
    rng = random.Random(5)
    driver = driver_for(demo_model)
    for number in range(30):
        prompt = tuple(make_prompt(rng, rng.randrange(10, 120), thinks=True, shared=number))
        driver.add(Job(f"r{number}", prompt, rng.randrange(5, 200), 100))
        for _ in range(6):
            driver.step()
        driver.abort(f"r{rng.randrange(number + 1)}")
    driver.drain()
    tracker = driver.scheduler.phase_tracker
    assert len(tracker) == tracker.num_reasoning == 0
    assert set(tracker.counts.values()) == {0}
    assert not driver.scheduler.request_states.waiting_answers


def test_a_boundary_that_arrives_after_the_preemption_makes_an_answer(demo_model):
    """Its token was on the way when the thinker was preempted: it resumes as an answer does."""
    driver = driver_for(demo_model, is_async=True, blocks=30)
    scheduler = driver.scheduler
    places = []
    arranged = scheduler.policy_parts.order.order_running

    def arrange(plan):
        is_in_time = arranged(plan)
        waiting = [request.request_id for request in scheduler.waiting]
        for name, request in scheduler.requests.items():
            state = scheduler.phase_tracker.get(name)
            if request.status == RequestStatus.PREEMPTED and state.phase is Phase.ANSWER:
                places.append(waiting.index(name))
        return is_in_time

    scheduler.policy_parts.order.order_running = arrange
    load(driver, 5)
    assert places
    assert set(places) == {0}
