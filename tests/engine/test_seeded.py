"""A request with a seed beside somebody who reads: model runner V1 on a CPU dies of its chunks."""

import pytest
from engine_plans import AMPLE, LONG_QUESTION, PATIENT
from run_engine import PATCHED, Job, run_job
from workloads import ask, engine_arguments

pytestmark = pytest.mark.engine

# A target that no step keeps: prompts come in the smallest pieces there are.
TIGHT = {
    "MERIDIAN_PATCH_SET_POLICY__ANSWER_ITL_MS": "0.01",
    "MERIDIAN_PATCH_SET_POLICY__PROTECTED_ANSWER_TOKENS": "100000",
}


def run_with(model, folder, **params):
    """Readers whose answers go on, and a long prompt that comes while they do."""
    readers = [
        ask(f"r{i}", problem, max_tokens=900, ignore_eos=True) for i, problem in enumerate(AMPLE)
    ]
    late = [
        ask(f"s{i}", f"{i} {LONG_QUESTION}", at_step=at, max_tokens=8, temperature=1.0, **params)
        for i, at in enumerate((500, 560, 620))
    ]
    stage = {
        "name": "seeded",
        "engine": engine_arguments(model, async_scheduling=False),
        "runs": [{"name": "all", "requests": [*readers, *late]}],
    }
    result = run_job(Job([stage], env=PATCHED | PATIENT | TIGHT), folder)
    return result["stages"]["seeded"]["runs"]["all"]


def test_a_seed_does_not_kill_the_engine(demo_model, tmp_path):
    """Its prompt comes in one step; without a seed the same prompts come in several."""
    seeded = run_with(demo_model, tmp_path / "seeded", seed=7)
    assert all(len(out["samples"][0]["ids"]) > 0 for out in seeded["outputs"].values())
    assert {seeded["prefill_steps"][f"s{i}"] for i in range(3)} == {1}
    plain = run_with(demo_model, tmp_path / "plain")
    assert min(plain["prefill_steps"][f"s{i}"] for i in range(3)) > 1
