"""Engines whose workers do not answer: probing ends, and log and status say why."""

import numpy as np
import pytest
from exit_driver import exit_driver, thinker
from scheduler_driver import Driver

from meridian_patch.engine import status, wire
from meridian_patch.engine.early_exit import signals
from meridian_patch.engine.early_exit.signals import MOST_LOST, MeasuredSignals

PROBED = {
    "EXIT__MODE": "observe",
    "EXIT__EAT_WARMUP_PROBES": "1000",
    "EXIT__PROBE_MIN_GAP_TOKENS": "1",
    "EXIT__PROBE_MAX_GAP_TOKENS": "1",
    "EXIT__PROBE_EVERY_STEPS": "1",
}
WHY = "its ranks share the sampling"


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def driver_for(request, monkeypatch, demo_model):
    def build(**kwargs):
        return exit_driver(monkeypatch, demo_model, is_async=request.param, **{**PROBED, **kwargs})

    return build


@pytest.fixture
def facts(monkeypatch):
    """What is published of this process."""
    found = {}
    monkeypatch.setattr(status, "publish", lambda **each: found.update(each))
    return found


@pytest.fixture
def logged(monkeypatch):
    """Warnings of our logger."""
    found = []
    monkeypatch.setattr(signals.logger, "warning", lambda text, *args: found.append(text % args))
    return found


def answer(monkeypatch, make_signals):
    """Workers whose steps come back with these signals, where any were asked for."""
    run, plans = Driver._run, []

    def with_signals(self, output):
        result = run(self, output)
        plan = getattr(output, wire.PLAN, None)
        if plan is not None:
            plans.append(plan)
            made = make_signals(plan)
            if made is None:
                delattr(result, wire.SIGNALS)
            else:
                setattr(result, wire.SIGNALS, made)
        return result

    monkeypatch.setattr(Driver, "_run", with_signals)
    return plans


def is_over(driver):
    scheduler = driver.scheduler
    return not (
        scheduler.requests
        or scheduler.early_exit.requests
        or scheduler.phase_counters.totals.get("fallback:exception")
    )


def test_a_worker_that_refuses_is_asked_no_more(driver_for, monkeypatch, facts, logged):
    """Nothing is measured or probed from then on; bounds still close."""
    plans = answer(monkeypatch, lambda _: MeasuredSignals((), None, None, WHY))
    driver = driver_for(EXIT__MODE="enforce", EXIT__MAX_THINK_TOKENS="64")
    for number in range(3):
        driver.add(thinker(f"r{number}", 200))
    driver.drain()
    # Asynchronously a second step was scheduled before the first was back.
    assert 1 <= len(plans) <= 2
    assert driver.scheduler.early_exit.probes is None
    assert facts["exit_signals"] == f"none: {WHY}"
    assert facts["probes"] == f"off: {WHY}"
    assert sum(WHY in line for line in logged) == 2
    totals = driver.scheduler.phase_counters.totals
    assert totals["exit:hard_cap"] == 3
    assert totals["probing_stopped:refused"] == 1
    assert is_over(driver)


def test_probes_that_are_lost_come_to_an_end(driver_for, monkeypatch, facts, logged):
    """A worker without a tap says nothing at all."""
    answer(monkeypatch, lambda _: None)
    driver = driver_for()
    for number in range(3):
        driver.add(thinker(f"r{number}", 200))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert MOST_LOST <= totals["probe:lost"] <= MOST_LOST + 6
    assert totals["probing_stopped:lost"] == 1
    assert driver.scheduler.early_exit.probes is None
    assert facts["probes"].endswith("probes in a row came back without a signal")
    assert sum("not probed" in line for line in logged) == 1
    assert is_over(driver)


def test_some_lost_probes_end_nothing(driver_for, monkeypatch, facts):
    """A worker that fails now and then goes on being asked."""
    steps = iter(range(100_000))

    def sometimes(plan):
        rows = np.array([[0.5, 5.0, 0.5, 0.01]] * len(plan.request_ids), np.float32)
        return MeasuredSignals(plan.request_ids, None, rows) if next(steps) % 4 == 0 else None

    answer(monkeypatch, sometimes)
    driver = driver_for()
    for number in range(3):
        driver.add(thinker(f"r{number}", 200))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert totals["probe:lost"] > MOST_LOST
    assert totals["probe:measured"] > 20
    assert driver.scheduler.early_exit.probes is not None
    assert facts.get("probes") is None
    assert not any(key.startswith("probing_stopped") for key in totals)
    assert is_over(driver)


def test_signals_that_are_no_numbers(driver_for, monkeypatch):
    """A model whose logits hold NaN: probes are counted as invalid, and close nothing."""
    nan = [[float("nan")] * 4]
    answer(
        monkeypatch,
        lambda plan: MeasuredSignals(
            plan.request_ids, None, np.array(nan * len(plan.request_ids), np.float32)
        ),
    )
    driver = driver_for(EXIT__MODE="enforce", EXIT__EAT_WARMUP_PROBES="2")
    driver.add(thinker("r", 100))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert totals["probe:invalid"] > 20
    assert "probe:measured" not in totals
    assert totals["exit:natural"] == 1
    assert totals["invalid_signals:think"] > 100
    assert is_over(driver)


@pytest.mark.parametrize(
    ("engine_args", "why"),
    [({"max_num_batched_tokens": 32}, "a probe takes up to 33 tokens, and a step has 32")],
)
def test_what_cannot_work_is_refused_at_the_start(driver_for, facts, logged, engine_args, why):
    driver = driver_for(engine_args=engine_args)
    assert driver.scheduler.early_exit.probes is None
    assert facts["probes"].startswith(f"off: {why}")
    assert any(why in line for line in logged)
    driver.add(thinker("r", 100))
    driver.drain()
    assert is_over(driver)


def test_shared_sampling_is_refused_at_the_start(driver_for, facts, monkeypatch):
    """The tap would close at the first step; nothing is asked of it."""
    plans = answer(monkeypatch, lambda _: MeasuredSignals((), None, None, WHY))
    driver_for()
    config = driver_for().scheduler.vllm_config
    monkeypatch.setattr(config.parallel_config, "enable_batch_sharded_sampling", True)
    driver = driver_for()
    assert driver.scheduler.early_exit.probes is None
    assert "the ranks share the sampling" in facts["exit_signals"]
    driver.add(thinker("r", 100))
    driver.drain()
    assert not plans
    assert is_over(driver)
