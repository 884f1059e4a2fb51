"""What a replay leaves out of vLLM's work changes no figure."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from meridian_patch.bench.simulated.arms import named_arm
from meridian_patch.bench.simulated.run import Offer, ReplayJob, run_job
from meridian_patch.replay import scheduler

POOLS = {"s-chat": 9_000, "s-turns": 14_000}


def job(arm: str, workload: str) -> ReplayJob:
    """So small a pool that requests are preempted and blocks evicted."""
    pool = POOLS[workload]
    return ReplayJob(Offer(workload, 20), 2, named_arm(arm), 20.0, pool, "h100-8b-dense")


@pytest.mark.parametrize("arm", [pytest.param("stock", marks=pytest.mark.nightly), "latency"])
@pytest.mark.parametrize("workload", ["s-turns", pytest.param("s-chat", marks=pytest.mark.nightly)])
def test_the_figures_are_those_of_all_of_vllm(
    arm: str, workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = run_job(job(arm, workload))
    monkeypatch.setattr(scheduler, "lean_scheduler", lambda original: original)
    monkeypatch.setattr(scheduler, "lean_manager", lambda original: original)
    whole = run_job(job(arm, workload))
    assert whole.figures["preemptions"]
    assert lean.figures == whole.figures
    assert lean.counters == whole.counters
    for ours, theirs in zip(astuple(lean.requests), astuple(whole.requests), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.nightly
def test_with_a_connector_it_is_told_of_running_requests() -> None:
    """An offload tier reads what a step's output says of requests that run."""
    figures = run_job(replace(job("stock", "s-chat"), offload_gb_per_s=20.0)).figures
    assert figures["preemptions"]
