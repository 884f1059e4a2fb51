"""A request with a seed beside an answer: model runner V1 on a CPU dies of its chunks."""

import pytest
from engine_plans import AMPLE, LONG_QUESTION, PATIENT
from run_engine import PATCHED, Job, run_job
from workloads import ask, engine_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

# A target that no step keeps, and nothing that widens the budget on a slow machine: prompts come in
# the smallest pieces there are.
TIGHT = {
    "MERIDIAN_PATCH_SET_POLICY__ANSWER_ITL_MS": "0.01",
    "MERIDIAN_PATCH_SET_POLICY__THINK_BATCH_MULTIPLIER": "1000",
    "MERIDIAN_PATCH_SET_POLICY__DRAIN_S": "1000",
    "MERIDIAN_PATCH_SET_POLICY__PROTECTED_ANSWER_TOKENS": "100000",
}


ANSWERS = {"template": {"enable_thinking": False}}


def run_with(name, **params):
    """Readers whose answers go on, and long prompts that come while they do."""
    readers = [
        ask(f"r{i}", problem, max_tokens=300, ignore_eos=True) | ANSWERS
        for i, problem in enumerate(AMPLE)
    ]
    # Each question is new: none comes from the prefix cache.
    late = [
        ask(f"s{i}", f"{name} {i} {LONG_QUESTION}", at_step=at, max_tokens=8, **params)
        for i, at in enumerate((100, 150, 200))
    ]
    return {"name": name, "requests": [*readers, *late]}


def test_a_seed_does_not_kill_the_engine(demo_model, tmp_path):
    """Its prompt comes in one step; without a seed the same prompts come in several."""
    runs = [run_with("seeded", temperature=1.0, seed=7), run_with("plain", temperature=1.0)]
    engine = engine_arguments(demo_model, async_scheduling=False)
    stage = {"name": "only", "engine": engine, "runs": runs}
    result = run_job(Job([stage], env=PATCHED | PATIENT | TIGHT), tmp_path)
    seeded, plain = (result["stages"]["only"]["runs"][run["name"]] for run in runs)
    assert all(len(out["samples"][0]["ids"]) > 0 for out in seeded["outputs"].values())
    assert {seeded["prefill_steps"][f"s{i}"] for i in range(3)} == {1}
    assert min(plain["prefill_steps"][f"s{i}"] for i in range(3)) > 1
