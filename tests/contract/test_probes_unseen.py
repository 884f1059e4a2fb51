"""Nobody who counts requests counts probes: data-parallel load, idleness, statistics."""

import pytest
from exit_driver import exit_driver, is_empty, thinker
from vllm.v1.request import RequestStatus

# Probed at every turn, and closed by none.
PROBED = {
    "EXIT__MODE": "observe",
    "EXIT__EAT_WARMUP_PROBES": "1000",
    "EXIT__PROBE_MIN_GAP_TOKENS": "1",
    "EXIT__PROBE_MAX_GAP_TOKENS": "2",
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
        if driver.scheduler.exits.probes.live:
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
    """Probes under way keep no data-parallel rank, and nobody who waits for the end, awake."""
    scheduler = driver.scheduler
    until_probed(driver)
    scheduler.finish_requests(list(NAMES), RequestStatus.FINISHED_ABORTED)
    assert scheduler.get_request_counts() == (0, 0)
    assert not scheduler.has_unfinished_requests()
    assert not scheduler.running
    driver.drain()
    assert is_empty(driver)


def test_one_that_waits_is_not_counted_either(driver):
    """While a step is scheduled a probe that found no place stands in the queue."""
    scheduler = driver.scheduler
    until_probed(driver)
    live = scheduler.exits.probes.live
    for name in live:
        scheduler.requests[name].status = RequestStatus.PREEMPTED
    assert scheduler.exits.without_probes((3, 5 + len(live))) == (3, 5)
