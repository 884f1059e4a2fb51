"""Probes and cache resets, pauses and resumed answers, on the real scheduler."""

import pytest
from exit_driver import exit_driver, is_empty, thinker
from scheduler_driver import Job

from meridian_patch.engine.begun import begun_in
from meridian_patch.phase.router import Phase

# Probed at every turn, and closed by none.
PROBED = {
    "EXIT__MODE": "observe",
    "EXIT__EAT_WARMUP_PROBES": "1000",
    "EXIT__PROBE_MIN_GAP_TOKENS": "1",
    "EXIT__PROBE_MAX_GAP_TOKENS": "2",
    "EXIT__PROBE_EVERY_STEPS": "1",
}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["v1", "v2"])
def driver(request, is_async, monkeypatch, demo_model):
    """A driver whose scheduler speaks to either model runner."""
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, tiered=True, **PROBED)
    driver.scheduler.use_v2_model_runner = request.param
    return driver


def step_until(driver, condition, limit=300):
    for _ in range(limit):
        driver.step()
        if condition():
            return
    raise AssertionError("it never came to that")


def exceptions(driver):
    return driver.scheduler.phase_counters.totals.get("fallback:exception", 0)


def test_an_answer_that_resumed_no_longer_waits(driver):
    """Under either runner's output shape, so that thoughts are probed again while it goes on."""
    scheduler = driver.scheduler
    prompt = thinker("answers").prompt
    driver.add(Job("answers", prompt, 3, 400))
    driver.add(thinker("thinks"))
    step_until(driver, lambda: scheduler.phase_router.get("answers").phase is Phase.ANSWER)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert list(scheduler._waiting_answers) == ["answers"]
    output = driver.step()
    assert set(begun_in(output)) == {"answers", "thinks"}
    assert not scheduler._waiting_answers
    made = scheduler.exits.probes.num_probes
    for _ in range(100):
        driver.step()
    assert scheduler.phase_router.get("answers").phase is Phase.ANSWER
    assert scheduler.exits.probes.num_probes > made + 20
    driver.drain()
    assert is_empty(driver)
