"""Calibration's entropies are those of the logits that stock vLLM returns for the same tokens."""

import pytest
from engine_plans import AMPLE, PRESSURE
from run_engine import Job, run_job
from workloads import ask_all, engine_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

LOGITS = {"max_logprobs": -1, "logprobs_mode": "raw_logits"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
# Room for about half of what six requests grow to. Each token's logits are all sent: few do.
PRESSED = {
    "num_gpu_blocks_override": 15,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
}
MAX_TOKENS = 60
STAGES = {
    # Tokens are known a step late, and those of a preempted request once more.
    "async": {"async_scheduling": True, **PRESSED},
    "ngram": {"speculative_config": NGRAM},
}


@pytest.fixture(scope="module")
def stages(demo_model, tmp_path_factory):
    def stage(name, changes):
        problems = PRESSURE[:6] if name == "async" else AMPLE
        requests = ask_all("r", problems, every_steps=3, max_tokens=MAX_TOKENS, logprobs=-1)
        return {
            "name": name,
            "engine": engine_arguments(demo_model, **LOGITS, **changes),
            "runs": [{"name": "run", "requests": requests}],
            "samples_entropies": True,
        }

    # The package is imported behind vLLM, and must not rebind anything.
    env = {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": ""}
    job = Job([stage(*each) for each in STAGES.items()], env=env, allow_async=True)
    return run_job(job, tmp_path_factory.mktemp("entropies"))["stages"]


@pytest.mark.parametrize("name", STAGES)
def test_every_token_has_the_entropy_of_its_logits(stages, name):
    """In nats, in float64, of every token that was accepted and of no other."""
    outputs = stages[name]["runs"]["run"]["outputs"]
    for output in outputs.values():
        [sample] = output["samples"]
        wanted = [entropy for entropy, *_ in sample["signals"]]
        assert len(wanted) == len(sample["ids"]) > 8
        assert sample["entropies"] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_the_engine_is_stock(stages):
    """No class of ours schedules; the hard paths were taken."""
    assert not any("Phase" in cls for stage in stages.values() for cls in stage["scheduler"])
    assert stages["async"]["runs"]["run"]["preemptions"]
    assert "AsyncScheduler" in stages["async"]["scheduler"]
    assert stages["ngram"]["runs"]["run"]["accepted"] > 0
