"""Counts of requests leave probes out, and a lowered budget does not."""

from collections import defaultdict

import pytest
from exit_driver import exit_driver, is_empty, thinker
from scheduler_driver import Job
from vllm.v1.request import RequestStatus

# Probed at every turn, and closed by none.
PROBED = {
    "EXIT__MODE": "observe",
    "EXIT__EAT_WARMUP_PROBES": "1000",
    "EXIT__PROBE_MIN_GAP_TOKENS": "1",
    "EXIT__PROBE_MAX_GAP_TOKENS": "2",
    "EXIT__PROBE_EVERY_STEPS": "1",
}
NAMES = ("one", "two", "three")


@pytest.fixture
def driver(monkeypatch, demo_model):
    """Asynchronous: probes are under way while others look."""
    driver = exit_driver(monkeypatch, demo_model, is_async=True, **PROBED)
    for name in NAMES:
        driver.add(thinker(name))
    return driver


def until_probed(driver):
    """Step until a probe is under way between two steps."""
    for _ in range(100):
        driver.step()
        if driver.scheduler.early_exit.probes.live:
            return
    raise AssertionError("no probe was under way")


def test_counts_are_of_users_requests(driver):
    scheduler = driver.scheduler
    until_probed(driver)
    assert len(scheduler.running) > len(NAMES)
    assert scheduler.get_request_counts() == (len(NAMES), 0)
    assert scheduler.get_num_unfinished_requests() == len(NAMES)
    assert scheduler.make_stats().num_running_reqs == len(NAMES)
    driver.drain()
    assert is_empty(driver)


def test_an_engine_is_idle_when_its_users_are_gone(driver):
    """Probes under way keep no data-parallel rank, and no wait for the end, awake."""
    scheduler = driver.scheduler
    until_probed(driver)
    scheduler.finish_requests(list(NAMES), RequestStatus.FINISHED_ABORTED)
    assert scheduler.get_request_counts() == (0, 0)
    assert not scheduler.has_unfinished_requests()
    assert not scheduler.running
    driver.drain()
    assert is_empty(driver)


def test_a_probe_in_the_queue_is_not_counted(driver):
    """Preempted between two steps, it stands there until the next one."""
    scheduler = driver.scheduler
    until_probed(driver)
    for name in scheduler.early_exit.probes.live:
        probe = scheduler.requests[name]
        scheduler.running.remove(probe)
        scheduler._preempt_request(probe, 0.0)
    assert len(scheduler.waiting)
    assert scheduler.get_request_counts() == (len(NAMES), 0)


@pytest.mark.parametrize("depth", [2, 3])
def test_counts_hold_with_more_steps_in_flight(monkeypatch, demo_model, depth):
    """Pipeline parallelism: a preempted probe's sample returns steps later.

    Until then the probe is in no queue. An engine whose counts sum to zero sleeps, and a
    data-parallel wave ends.
    """
    driver = exit_driver(monkeypatch, demo_model, is_async=True, blocks=40, **PROBED)
    driver.depth = depth
    scheduler = driver.scheduler
    for number in range(12):
        driver.add(thinker(f"user{number}", prompt_tokens=40 + number))
    num_between_queues = 0
    for _ in range(3000):
        if not driver.scheduler.requests:
            break
        driver.step()
        probes = set(scheduler.early_exit.probes.live)
        queues = scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting
        running, *waiting = [sum(r.request_id not in probes for r in q) for q in queues]
        assert scheduler.get_request_counts() == (running, sum(waiting))
        num_between_queues += len(probes) > sum(r.request_id in probes for q in queues for r in q)
    assert num_between_queues
    driver.drain()
    assert is_empty(driver)


def test_no_client_is_told_that_a_probe_is_over(driver):
    """With several engines clients are told which requests ended, whenever they did."""
    scheduler = driver.scheduler
    scheduler.finished_req_ids_dict = defaultdict(set)
    update, told = scheduler.update_from_output, set()

    def watched(*args):
        outputs = update(*args)
        told.update(*(each.finished_requests or () for each in outputs.values()))
        return outputs

    scheduler.update_from_output = watched
    driver.drain()
    assert scheduler.early_exit.probes.num_probes > 5
    assert told <= set(NAMES)


def test_a_lowered_budget_has_room_for_a_probe(driver, monkeypatch):
    """With large blocks none would fit in a step beside an answer, as long as one answers."""
    scheduler = driver.scheduler
    cut, probes = scheduler.policy_parts.cut, scheduler.early_exit.probes
    monkeypatch.setattr(cut._cut, "token_budget", lambda shape, *_: shape.decode_tokens + 1)
    driver.add(Job("answers", (65,) * 8, None, 200))
    while len(scheduler.running) < 1 + len(NAMES):
        driver.step()
    before = probes.num_probes
    for _ in range(40):
        driver.step()
    assert probes.num_probes - before >= 5
    driver.drain()
