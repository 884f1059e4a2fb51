"""What fails in early exit ends the step's early exit, never the engine."""

import pytest
from exit_driver import exit_driver, thinker
from scheduler_driver import THINK_END
from vllm.v1.request import RequestStatus

from meridian_patch.engine import wire
from meridian_patch.engine.early_exit import part
from meridian_patch.phase.tracker import Phase


@pytest.fixture
def driver(monkeypatch, demo_model):
    """One whose requests have probes under way."""
    driver = exit_driver(monkeypatch, demo_model, is_async=True)
    for name in ("one", "two", "three"):
        driver.add(thinker(name))
    for _ in range(100):
        driver.step()
        if driver.scheduler.early_exit.probes.live:
            return driver
    raise AssertionError("no probe was under way")


def num_failed(driver):
    return driver.scheduler.phase_counters.totals.get("fallback:exception", 0)


def test_signals_that_cannot_be_read(driver, monkeypatch):
    """A worker of another build sends them; the tokens beside them are fine."""
    plain = driver._run

    def with_nonsense(output):
        result = plain(output)
        setattr(result, wire.SIGNALS, "no signals")
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
        patched.setattr(scheduler.early_exit.probes, "cancel", fails)
        patched.setattr(scheduler.early_exit.probes, "cancel_all", fails)
        scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    assert num_failed(driver)
    ended = ("one", "two", "three") if names is None else (names if names != "one" else ["one"])
    assert not set(ended) & set(scheduler.requests)
    driver.drain()
    assert not scheduler.requests


def test_a_request_whose_last_tokens_cannot_be_followed(monkeypatch, demo_model):
    """It ends within its thought; no seat stays kept for its probes."""
    driver = exit_driver(monkeypatch, demo_model)
    scheduler, follow = driver.scheduler, part.follow

    def fails_at_the_end(*args):
        if scheduler.requests["r"].is_finished():
            raise RuntimeError("cannot follow")
        return follow(*args)

    monkeypatch.setattr(part, "follow", fails_at_the_end)
    driver.add(thinker("r", max_tokens=15))
    driver.step()
    seats = scheduler.max_num_active_reqs
    assert scheduler.early_exit.user_seats(seats) < seats
    driver.drain()
    assert num_failed(driver) == 1
    assert scheduler.early_exit.user_seats(seats) is None
    assert scheduler.early_exit.is_idle


@pytest.mark.parametrize("hook", ["observe", "expects"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_boundary_that_could_not_be_followed(monkeypatch, demo_model, hook, is_async):
    """The request is judged by all of its tokens: it answers, and no close comes behind that."""
    driver = exit_driver(
        monkeypatch, demo_model, is_async=is_async, EXIT__EAT="false", EXIT__MAX_THINK_TOKENS="60"
    )
    tracker = driver.scheduler.phase_tracker
    follow = getattr(tracker, hook)

    def fails_at_the_end(*args):
        state = tracker.get("r")
        tokens = args[0][0] if hook == "expects" and args[0] else state.known[-1:] if state else []
        if THINK_END in tokens:
            raise RuntimeError("cannot follow")
        return follow(*args)

    monkeypatch.setattr(tracker, hook, fails_at_the_end)
    driver.add(thinker("r", 40, prompt_tokens=40))
    for _ in range(60):
        driver.step()
    assert num_failed(driver)
    assert tracker.get("r").phase is Phase.ANSWER
    driver.drain()
    assert not driver.forced
    assert not driver.scheduler.requests
    assert set(tracker.counts.values()) == {0}
