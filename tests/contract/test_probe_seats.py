"""Probes and users' requests for the same seats and turns, on vLLM's real scheduler."""

from dataclasses import dataclass, replace

import pytest
from exit_driver import exit_driver, is_empty, thinker
from scheduler_driver import THINK_START, WORD, Job
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from meridian_patch.engine.upstream import is_release
from meridian_patch.phase.tracker import Phase

SEATS = 16
OFTEN = {"EXIT__PROBE_MIN_GAP_TOKENS": "8", "EXIT__PROBE_MAX_GAP_TOKENS": "8"}
# None of them takes the thought for converged.
NEVER = {"EXIT__EAT_DELTA": "0.000000000001", "EXIT__EAT_WARMUP_PROBES": "1000"}


@pytest.mark.parametrize(("mode", "thinkers"), [("observe", SEATS - 1), ("enforce", SEATS - 2)])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_probes_do_not_starve_a_newcomer(monkeypatch, demo_model, mode, thinkers, is_async):
    """Thinkers that are probed every eight tokens leave it one seat of sixteen.

    In mode enforce another one is kept for probes: without one a full batch could not be closed.
    """
    settings = {**OFTEN, **NEVER, "EXIT__MODE": mode, "EXIT__PROBE_EVERY_STEPS": "1"}
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, blocks=900, **settings)
    scheduler = driver.scheduler
    for number in range(thinkers):
        driver.add(thinker(f"thinker{number}", 1400))
        driver.step()
    for _ in range(60):
        driver.step()
    probes = scheduler.early_exit.probes
    assert probes.num_probes > 5
    driver.add(thinker("new", 20))
    steps = 0
    while scheduler.requests["new"].status != RequestStatus.RUNNING:
        driver.step()
        steps += 1
        assert steps <= 12
    # It holds the last seat then; probes come back when it ends.
    while "new" in scheduler.requests:
        driver.step()
    before = probes.num_probes
    for _ in range(60):
        driver.step()
    assert probes.num_probes > before


def test_no_seat_is_kept_while_no_request_thinks(monkeypatch, demo_model):
    """In mode enforce every request is measured from its first step, and most never think."""
    driver = exit_driver(monkeypatch, demo_model, blocks=900, EXIT__MODE="enforce")
    for number in range(SEATS):
        driver.add(Job(f"plain{number}", (WORD,) * 20, None, 30))
    for _ in range(3):
        driver.step()
    assert not driver.scheduler.phase_tracker.num_reasoning
    assert len(driver.scheduler.running) == SEATS


def test_no_seat_is_kept_while_those_that_have_thought_answer(monkeypatch, demo_model):
    """Requests that wait for a seat and never think are measured, too."""
    driver = exit_driver(monkeypatch, demo_model, blocks=900, EXIT__MODE="enforce")
    driver.add(thinker("reader", 5))
    driver.jobs["reader"] = replace(driver.jobs["reader"], answer_tokens=1000)
    while driver.scheduler.phase_tracker.get("reader").phase is not Phase.ANSWER:
        driver.step()
    for number in range(SEATS + 4):
        driver.add(Job(f"plain{number}", (WORD,) * 20, None, 300))
    for _ in range(5):
        driver.step()
    assert len(driver.scheduler.running) == SEATS


@dataclass(frozen=True)
class OpensItself(Job):
    """Its prompt ends without a marker; its first token opens a thought without end."""

    def token(self, index):
        return THINK_START if index == 0 else super().token(index)


def test_a_seat_is_kept_where_the_model_opens_its_thoughts_itself(monkeypatch, demo_model):
    """A burst that fills all seats before its first tokens could not be probed or closed."""
    driver = exit_driver(monkeypatch, demo_model, blocks=900, EXIT__MODE="enforce")
    driver.add(OpensItself("first", (WORD,) * 12, 20, 5))
    driver.drain()
    for number in range(SEATS + 4):
        driver.add(OpensItself(f"burst{number}", (WORD,) * 12, 1400, 5))
    for _ in range(150):
        driver.step()
    assert len(driver.scheduler.running) <= SEATS
    assert driver.scheduler.early_exit.probes.num_probes > 2


@pytest.mark.parametrize("queue", ["fcfs", "priority"])
def test_probes_go_on_while_a_request_waits_for_blocks(monkeypatch, demo_model, queue):
    """Seats are free and one that came earlier cannot use one: probes do."""
    arguments = {"scheduling_policy": queue}
    settings = {**OFTEN, **NEVER, "EXIT__MODE": "observe", "POLICY__TIME_SHARING": "false"}
    driver = exit_driver(monkeypatch, demo_model, blocks=60, engine_args=arguments, **settings)
    scheduler = driver.scheduler
    scheduler.max_num_active_reqs = scheduler.max_num_running_reqs = 2
    driver.add(thinker("runs", 1200, arrival_time=5.0))
    while scheduler.phase_tracker.get("runs").phase is not Phase.THINK:
        driver.step()
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 20)
    driver.add(thinker("waits", 20, prompt_tokens=1000, arrival_time=2.0))
    before = scheduler.early_exit.probes.num_probes
    for _ in range(200):
        driver.step()
    assert scheduler.requests["waits"].status == RequestStatus.WAITING
    assert scheduler.early_exit.probes.num_probes - before > 5


def test_a_probe_in_a_queue_by_priority_has_the_arrival_of_its_request(monkeypatch, demo_model):
    """For a step other arrival times stand in for those of running requests."""
    arguments = {"scheduling_policy": "priority"}
    driver = exit_driver(monkeypatch, demo_model, engine_args=arguments)
    driver.add(thinker("early", arrival_time=1.0))
    driver.add(thinker("late", arrival_time=5.0))
    probes, seen = driver.scheduler.early_exit.probes, {}
    settle = probes.settle

    def settled(output):
        for name, due in probes.live.items():
            arrivals = driver.scheduler.requests[name].arrival_time, due.parent.arrival_time
            seen.setdefault(due.parent.request_id, set()).add(arrivals)
        settle(output)

    monkeypatch.setattr(probes, "settle", settled)
    for _ in range(200):
        driver.step()
    assert seen == {"early": {(1.0, 1.0)}, "late": {(5.0, 5.0)}}


def test_a_probe_without_a_place_leaves_a_queue_by_priority_from_its_front(monkeypatch, demo_model):
    """To take one out of a heap's middle takes as long as the queue is."""
    arguments = {"scheduling_policy": "priority"}
    driver = exit_driver(monkeypatch, demo_model, engine_args=arguments)
    driver.add(thinker("thinks"))
    scheduler = driver.scheduler
    probes = scheduler.early_exit.probes
    while not probes.are_next:
        driver.step()
    for number in range(20):
        driver.add(thinker(f"later{number}", arrival_time=1.0))
    probes.share_seats(is_kept=False)
    probes.offer()
    assert len(probes.live) == 1
    assert len(scheduler.waiting) == 21
    with monkeypatch.context() as patched:
        patched.setattr(type(scheduler.waiting), "remove_request", None)
        probes.settle(SchedulerOutput.make_empty())
    assert not probes.live
    assert probes.are_next
    assert len(scheduler.waiting) == 20
    driver.drain()
    assert is_empty(driver)


@pytest.mark.skipif(not is_release("0.33"), reason="vLLM has this cadence from 0.33 on")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_probe_puts_no_prompt_off_under_a_prefill_cadence(monkeypatch, demo_model, is_async):
    """vLLM counts a probe as a prompt: the next user's prompt would wait for four more steps."""
    settings = {**OFTEN, **NEVER, "EXIT__MODE": "observe"}
    cadence = {"prefill_schedule_interval": 4}
    driver = exit_driver(
        monkeypatch, demo_model, is_async=is_async, engine_args=cadence, **settings
    )
    scheduler = driver.scheduler
    driver.add(thinker("first"))
    driver.step()
    began, restarts = scheduler.last_prefill_step, []
    for step in range(200):
        if step == 60:
            assert scheduler.phase_counters.totals["probe:measured"] >= 3
            assert scheduler.last_prefill_step == began
            # Longer than a step's tokens: probes run beside its chunks.
            driver.add(thinker("second", prompt_tokens=1500))
        before = scheduler.last_prefill_step
        scheduled = driver.step().num_scheduled_tokens
        if scheduler.last_prefill_step != before:
            restarts.append(scheduled.get("second", 0))
    assert len(restarts) >= 2
    assert all(restarts)
    assert driver.deliveries["second"]
