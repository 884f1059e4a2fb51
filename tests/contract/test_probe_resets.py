"""Probes and cache resets, pauses and resumed answers, on the real scheduler."""

from unittest.mock import Mock

import pytest
from exit_driver import exit_driver, is_empty, thinker
from scheduler_driver import BLOCK_SIZE, Job
from stub_connector import StubConnector
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc

from meridian_patch.engine.scheduler.started_requests import started_requests
from meridian_patch.phase.tracker import Phase

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
    step_until(driver, lambda: scheduler.phase_tracker.get("answers").phase is Phase.ANSWER)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    waiting = scheduler.request_states.waiting_answers
    assert list(waiting) == [scheduler.request_states.get("answers")]
    output = driver.step()
    assert set(started_requests(output)) == {"answers", "thinks"}
    assert not waiting
    made = scheduler.early_exit.probes.num_probes
    for _ in range(100):
        driver.step()
    assert scheduler.phase_tracker.get("answers").phase is Phase.ANSWER
    assert scheduler.early_exit.probes.num_probes > made + 20
    driver.drain()
    assert is_empty(driver)


def until_probed(driver):
    """Step until a probe is under way between two steps; synchronously it never is."""
    probes = driver.scheduler.early_exit.probes
    made = probes.num_probes
    step_until(driver, lambda: probes.live if driver.is_async else probes.num_probes > made)


def test_probing_goes_on_after_a_reset(driver):
    """A reset with a probe under way costs no step its early exit."""
    scheduler = driver.scheduler
    probes = scheduler.early_exit.probes
    for name in ("one", "two", "three"):
        driver.add(thinker(name, 600))
    for _ in range(5):
        until_probed(driver)
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        made = probes.num_probes
        for _ in range(40):
            driver.step()
        assert probes.num_probes > made + 20
    assert probes.most_computed_tokens <= BLOCK_SIZE + 1
    assert not exceptions(driver)
    driver.drain()
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [True], ids=["async"])
def test_a_probe_that_ends_behind_a_preemption(driver):
    """Preempted with its sample on the way, and gone before the next step: it is forgotten.

    Only asynchronously is a probe under way between two steps.
    """
    scheduler = driver.scheduler
    for name in ("one", "two"):
        driver.add(thinker(name, 300))
    until_probed(driver)
    [name, *_] = scheduler.early_exit.probes.live
    probe = scheduler.requests[name]
    scheduler.running.remove(probe)
    scheduler._preempt_request(probe, 0.0)
    driver.abort(name)
    for _ in range(100):
        driver.step()
    assert not exceptions(driver)
    driver.drain()
    assert is_empty(driver)


@pytest.mark.parametrize("state", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
def test_a_paused_engine_makes_no_probes(driver, state, monkeypatch):
    """As upstream pauses, puts to sleep and wakes: pause, reset, resume."""
    scheduler = driver.scheduler
    probes, made = scheduler.early_exit.probes, []
    make = probes._make
    monkeypatch.setattr(probes, "_make", lambda *args: made.append(args) or make(*args))
    for name in ("one", "two"):
        driver.add(thinker(name, 300))
    until_probed(driver)
    scheduler.set_pause_state(state)
    # Those under way may end.
    for _ in range(3):
        driver.step()
    made.clear()
    for _ in range(30):
        driver.step()
    assert not made
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.step()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    for _ in range(60):
        driver.step()
    assert len(made) > 10
    assert not exceptions(driver)
    driver.drain()
    assert is_empty(driver)


def test_everything_is_aborted_with_probes_under_way(driver):
    scheduler = driver.scheduler
    for name in ("one", "two", "three"):
        driver.add(thinker(name, 300))
    until_probed(driver)
    driver.abort(None)
    assert not scheduler.requests
    driver.add(thinker("last", 60))
    driver.drain()
    assert not exceptions(driver)
    assert is_empty(driver)


def test_a_pause_that_keeps_requests_is_over_with_a_probe_between_its_chunks(
    is_async, monkeypatch, demo_model
):
    """With a connector upstream waits for every request that it does not count, as probes are."""
    in_chunks = {"long_prefill_token_threshold": 4}
    driver = exit_driver(
        monkeypatch, demo_model, is_async=is_async, engine_args=in_chunks, **PROBED
    )
    scheduler = driver.scheduler
    probes = scheduler.early_exit.probes
    scheduler.connector = StubConnector()
    for name in ("one", "two", "three"):
        driver.add(thinker(name, 300))
    step_until(
        driver, lambda: any(scheduler.requests[each].is_prefill_chunk for each in probes.live)
    )
    engine = waiting_engine(scheduler)
    paused = engine.pause_scheduler("keep", clear_cache=False)
    for _ in range(4):
        driver.step()
    assert not engine.has_work()
    engine._notify_idle_state_callbacks()
    assert paused.done()
    made = probes.num_probes
    scheduler.set_pause_state(PauseState.UNPAUSED)
    for _ in range(60):
        driver.step()
    assert probes.num_probes > made + 5
    scheduler.connector = None
    driver.drain()
    assert is_empty(driver)


def waiting_engine(scheduler):
    """The part of vLLM's engine that waits until a pause is over."""
    engine = object.__new__(EngineCoreProc)
    engine.scheduler, engine.model_executor = scheduler, Mock()
    engine.engines_running, engine.batch_queue, engine._idle_state_callbacks = False, None, []
    return engine
