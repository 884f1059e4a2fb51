"""What phase-aware scheduling does on a real engine whose KV pool is too small."""

import pytest
from workloads import THINK_END, phases_after_prefill, preempted_phases, sample

pytestmark = pytest.mark.engine

THINK_END_ID = 257
PATHS = (pytest.param("sync", marks=pytest.mark.nightly), "async")
SCHEDULERS = {"sync": "PhaseScheduler", "async": "AsyncPhaseScheduler"}


def pressure(result: dict, path: str) -> dict:
    return result["stages"][path]["runs"]["pressure"]


@pytest.mark.parametrize("path", PATHS)
def test_no_answer_is_preempted(v1_patched, path):
    """The latency policy preempts, and only requests that do not answer."""
    phases = preempted_phases(pressure(v1_patched, path))
    assert phases
    assert "answer" not in phases


@pytest.mark.parametrize("path", PATHS)
def test_stock_and_noop_preempt_answers(v1_stock, v1_noop, path):
    """Without the policy the same load loses answers, the same ones in stock and noop."""
    stock, noop = (pressure(result, path)["preemptions"] for result in (v1_stock, v1_noop))
    assert "answer" in [entry["phase"] for entry in stock]
    assert noop == stock


@pytest.mark.parametrize("path", PATHS)
def test_the_phase_scheduler_is_the_one_that_ran(v1_patched, path):
    """The scheduler of each path is our subclass of vLLM's class for that path."""
    stage = v1_patched["stages"][path]
    assert stage["scheduler"][0] == SCHEDULERS[path]
    assert "PhaseScheduling" in stage["scheduler"]
    assert ("AsyncScheduler" in stage["scheduler"]) == (path == "async")


@pytest.mark.parametrize("path", PATHS)
def test_the_tracker_follows_every_request(v1_patched, path):
    """Every request went through its phases in order, as its tokens say, and none is left over."""
    run = pressure(v1_patched, path)
    assert run["misrouted"] == 0
    for name in run["outputs"]:
        answer = sample(run, name)["text"].partition(THINK_END)[2]
        assert phases_after_prefill(run, name) == (["think", "answer"] if answer else ["think"])
    assert run["routed_left"] == 0


def reasoning_by_ids(sample: dict) -> int:
    """Tokens before the end of the thought that the chat template opens."""
    ids = sample["ids"]
    return ids.index(THINK_END_ID) if THINK_END_ID in ids else len(ids)


@pytest.mark.parametrize(("job", "fewest"), [("v1_patched", 50), ("v2_patched", 16)])
def test_reasoning_tokens_are_those_by_token_ids(request, job, fewest):
    """On every way through the engine: preempted, aborted, drafted, forced, several samples."""
    stages = request.getfixturevalue(job)["stages"]
    seen = [
        (stage, run, name, sample)
        for stage, result in stages.items()
        for run, said in result["runs"].items()
        for name, output in said["outputs"].items()
        for sample in output["samples"]
        if sample["ids"] and "reasoning_tokens" in sample
    ]
    assert len(seen) >= fewest
    assert any(0 < reasoning_by_ids(sample) < len(sample["ids"]) for *_, sample in seen)
    wrong = [
        (stage, run, name, sample["reasoning_tokens"], reasoning_by_ids(sample))
        for stage, run, name, sample in seen
        if sample["reasoning_tokens"] != reasoning_by_ids(sample)
    ]
    assert not wrong


def test_no_answer_is_preempted_on_model_runner_v2(v2_stock, v2_patched):
    """The same on the model runner that GPUs use."""
    assert "answer" in preempted_phases(pressure(v2_stock, "async"))
    patched = pressure(v2_patched, "async")
    assert preempted_phases(patched)
    assert "answer" not in preempted_phases(patched)
    assert patched["misrouted"] == 0
    assert patched["routed_left"] == 0
