"""Operators interfere while clients read their streams, and sessions go on behind answers."""

import pytest
from matrix_checks import assert_cores_work, measured
from matrix_plans import cell as stage
from matrix_plans import session, streaming_crowd

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1200)]

HOLD_S = 0.6
# By the run's name: what an operator does when so many tokens have come.
RUNS = {
    "pause": [{"do": "pause", "mode": "keep", "at_token": 150, "hold_s": HOLD_S}],
    "sleep0": [{"do": "sleep", "level": 0, "mode": "keep", "at_token": 150, "hold_s": HOLD_S}],
    "sleep1": [{"do": "sleep", "level": 1, "mode": "wait", "at_token": 150, "hold_s": 0.0}],
    "reset": [
        {"do": "reset_prefix_cache", "reset_running_requests": True, "at_token": at}
        for at in range(100, 500, 50)
    ],
}


@pytest.fixture(scope="module")
def operated(both_jobs, tiny):
    runs = [streaming_crowd() | {"name": name, "events": do} for name, do in RUNS.items()]
    sessions = streaming_crowd()
    sessions["requests"] = sessions["requests"][::2] + [session(n) for n in range(3)]
    runs.append(sessions | {"name": "sessions"})
    stages = [stage("operated", tiny("dense"), runs, async_scheduling=True)]
    return both_jobs("operated", stages, is_async=True)["operated"]


@pytest.mark.parametrize(
    ("run", "name"),
    [("pause", "pause and resume"), ("sleep0", "sleep and wake, level 0")],
)
def test_held(operated, cell, run, name):
    """While it lasts nothing comes; then everything goes on where it was."""
    note = assert_cores_work(operated, run=run)
    for report in operated.runs(run):
        [event] = report["events"]
        before, after = event["produced"]
        assert 0 < before == after
    cell.works(name, note, measured(operated, run))


def test_sleep_at_level_1(operated, cell):
    """On the CPU workers keep their memory, and say so; the engine's part is as on a GPU."""
    note = assert_cores_work(operated, run="sleep1")
    assert "sleep mode is not supported on CPU" in operated.log
    reason = "workers on a CPU keep their memory (vLLM says so); the scheduler's part ran"
    cell.works("sleep and wake, level 1", f"{note}; {reason}", measured(operated, "sleep1"))


def test_reset(operated, cell):
    """Running requests start over, their probes are dropped, and outputs are stock's."""
    note = assert_cores_work(operated, run="reset")
    _, patched = operated.runs("reset")
    assert any(event["result"] for event in patched["events"])
    [core] = patched["cores"]
    assert core["probed_preemptions"] > 0
    name = "reset of the prefix cache, a probe running"
    cell.works(name, note, measured(operated, "reset"))


def test_sessions(operated, cell):
    """Each turn goes on from the blocks of the one before, among thinkers that fill the pool."""
    note = assert_cores_work(operated, run="sessions")
    _, patched = operated.runs("sessions")
    lengths = {n: len(out["samples"][0]["ids"]) for n, out in patched["outputs"].items()}
    assert all(n == 50 for name, n in lengths.items() if name.startswith("session"))
    cell.works("streaming sessions", note, measured(operated, "sessions"))
