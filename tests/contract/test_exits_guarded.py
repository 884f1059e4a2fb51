"""What fails in early exit ends the step's early exit, never the engine."""

import pytest
from exit_driver import exit_driver, thinker
from vllm.v1.request import RequestStatus

from meridian_patch.engine.signals import SIGNALS_FIELD


@pytest.fixture
def driver(monkeypatch, demo_model):
    """One whose requests have probes under way."""
    driver = exit_driver(monkeypatch, demo_model, is_async=True)
    for name in ("one", "two", "three"):
        driver.add(thinker(name))
    for _ in range(100):
        driver.step()
        if driver.scheduler.exits.probes.live:
            return driver
    raise AssertionError("no probe was under way")


def num_failed(driver):
    return driver.scheduler.phase_counters.totals.get("fallback:exception", 0)


def test_signals_that_cannot_be_read(driver, monkeypatch):
    """A worker of another build sends them; the tokens beside them are fine."""
    plain = driver._run

    def with_nonsense(output):
        result = plain(output)
        setattr(result, SIGNALS_FIELD, "no signals")
        return result

    with monkeypatch.context() as patched:
        patched.setattr(driver, "_run", with_nonsense)
        for _ in range(5):
            driver.step()
    assert num_failed(driver) >= 3
    driver.drain()
    assert not driver.scheduler.requests
    assert all(len(steps) > 400 for steps in driver.deliveries.values())


@pytest.mark.parametrize("names", ["one", ["one", "two"], None])
def test_probes_that_cannot_be_ended(driver, monkeypatch, names):
    """Their parents end all the same."""
    scheduler = driver.scheduler

    def fails(*_):
        raise RuntimeError("cannot cancel")

    with monkeypatch.context() as patched:
        patched.setattr(scheduler.exits.probes, "cancel", fails)
        patched.setattr(scheduler.exits.probes, "cancel_all", fails)
        scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    assert num_failed(driver)
    ended = ("one", "two", "three") if names is None else (names if names != "one" else ["one"])
    assert not set(ended) & set(scheduler.requests)
    driver.drain()
    assert not scheduler.requests
