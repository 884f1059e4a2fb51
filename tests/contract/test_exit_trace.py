"""The trace of early exit, by the real scheduler: every result, verdict and end, once."""

import json
import logging
import random

import pytest
from scheduler_driver import Driver, Job, engine_config, make_prompt
from vllm.v1.core.sched.scheduler import Scheduler

from meridian_patch.engine.scheduler.scheduler import build_phase_scheduler

# Probes come early, and a steady entropy is taken for convergence soon.
EAGER = {
    "EXIT__MODE": "enforce",
    "EXIT__MIN_THINK_TOKENS": "20",
    "EXIT__EAT_WARMUP_PROBES": "2",
    "EXIT__EAT_MAX_ENTROPY_NATS": "null",
    "EXIT__PROBE_MIN_GAP_TOKENS": "8",
    "EXIT__PROBE_MAX_GAP_TOKENS": "16",
    "EXIT__PROBE_EVERY_STEPS": "1",
    "POLICY__TIME_BUDGET_US": "10000000",
}


def thinker(name, think_tokens=400, **kwargs):
    prompt = make_prompt(random.Random(name), 40, thinks=True, shared=len(name))
    return Job(name, tuple(prompt), think_tokens, 30, **kwargs)


@pytest.fixture
def trace(tmp_path):
    return tmp_path / "trace.jsonl"


@pytest.fixture
def driver_for(monkeypatch, demo_model, trace):
    def build(**settings):
        for name, value in {**EAGER, "EXIT__TRACE": str(trace), **settings}.items():
            monkeypatch.setenv(f"MERIDIAN_PATCH_SET_{name}", value)
        config = engine_config(demo_model, is_async=False, blocks=200)
        return Driver.build(build_phase_scheduler(Scheduler), config, is_async=False)

    return build


def events(trace, kind=None):
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    return [line for line in lines if kind in (None, line["event"])]


def test_a_thought_that_is_closed(driver_for, trace):
    """All probes, then the verdict, then the end that repeats it."""
    driver = driver_for()
    driver.add(thinker("r"))
    driver.drain()
    measured = driver.scheduler.phase_counters.totals["probe:measured"]
    assert [line["event"] for line in events(trace)] == ["probe"] * measured + ["verdict", "end"]
    assert {(line["request"], line["thought"]) for line in events(trace)} == {("r", 1)}
    probes = events(trace, "probe")
    places = [line["think_tokens"] for line in probes]
    assert places == sorted(set(places))
    assert {(line["entropy_nats"], line["variance_nats2"]) for line in probes} == {(1.0, 0.0)}
    [verdict], [end] = events(trace, "verdict"), events(trace, "end")
    assert verdict["reason"] == end["reason"] == "eat"
    assert end["think_tokens"] >= verdict["think_tokens"] >= verdict["fired_at"]
    repeated = {n: v for n, v in verdict.items() if n not in ("event", "request", "thought")}
    assert end["verdict"] == repeated


def test_a_verdict_that_is_only_observed(driver_for, trace):
    """The thought's own end comes behind it."""
    driver = driver_for(EXIT__MODE="observe")
    driver.add(thinker("r", 300))
    driver.add(thinker("short", 10))
    driver.drain()
    assert len(events(trace, "verdict")) == 1
    by_request = {line["request"]: line for line in events(trace, "end")}
    assert by_request["r"]["reason"] == by_request["short"]["reason"] == "natural"
    assert by_request["r"]["think_tokens"] == 301
    assert by_request["short"]["verdict"] is None


def test_thoughts_that_requests_cut_off(driver_for, trace):
    """Aborted, and out of tokens: no reason. One that is not followed leaves no line."""
    driver = driver_for(EXIT__EAT="false")
    for name in ("aborted", "long"):
        driver.add(thinker(name, max_tokens=30))
    driver.add(thinker("off"), {"meridian_exit": "off"})
    for _ in range(20):
        driver.step()
    driver.abort("aborted")
    driver.drain()
    ends = {line["request"]: line for line in events(trace)}
    assert set(ends) == {"aborted", "long"}
    assert [ends[name]["reason"] for name in ("aborted", "long")] == [None, "unanswered"]
    assert ends["long"]["think_tokens"] == 30


def test_no_trace_unless_asked_for(driver_for, trace):
    """Unset is the default."""
    driver = driver_for(EXIT__TRACE="null")
    driver.add(thinker("r"))
    driver.drain()
    assert not trace.exists()


def test_a_trace_that_fails_is_switched_off(driver_for, trace, caplog_vllm):
    """One line in the log; requests end as they would, and nothing is kept for later."""
    driver = driver_for()
    trace.mkdir()
    for number in range(3):
        driver.add(thinker(f"r{number}"))
    driver.drain()
    said = [r.getMessage() for r in caplog_vllm.records if "exit.trace" in r.getMessage()]
    assert len(said) == 1
    assert str(trace) in said[0]
    totals = driver.scheduler.phase_counters.totals
    assert totals["exit:eat"] == 3
    assert not totals.get("fallback:exception")
    trace.rmdir()
    driver.add(thinker("later"))
    driver.drain()
    assert not trace.exists()


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """vLLM's loggers do not pass on what they log."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog
