"""Probes at the limits of real engines: the model's length, and the sampler's path."""

import pytest
from engine_plans import AMPLE, PATIENT
from run_engine import PATCHED, STOCK, Job, run_job
from workloads import ask_all, engine_arguments, token_ids

from meridian_patch.engine import wire
from meridian_patch.engine.scheduler.policy_part import _MOST_WAITED_STEPS

pytestmark = pytest.mark.engine

# Model runner V2's kernels are interpreted here, which is slow.
MAX_MODEL_LEN = {"v1": 192, "v2": 128}
# The thought's end and the turn's are never sampled.
RUNAWAY = {"logit_bias": {257: -100.0, 259: -100.0}, "max_tokens": 400}
SETTINGS = {
    "EXIT__MODE": "observe",
    "EXIT__PROBE_MIN_GAP_TOKENS": "1",
    "EXIT__PROBE_MAX_GAP_TOKENS": "1",
    "EXIT__PROBE_EVERY_STEPS": "1",
}
PROBING = {f"MERIDIAN_PATCH_SET_{name}": value for name, value in SETTINGS.items()}


def runaway_stage(demo_model, name, job, requests):
    length = MAX_MODEL_LEN[job]
    engine = engine_arguments(
        demo_model,
        max_model_len=length,
        max_num_batched_tokens=length,
        async_scheduling=name == "async",
    )
    requests = ask_all("r", AMPLE[:requests], every_steps=2, **RUNAWAY)
    return {"name": name, "runs": [{"name": "run", "requests": requests}], "engine": engine}


def both(stage, folder, **job):
    """The stage's run on a stock and on a probing engine."""
    for name, env in (("stock", STOCK), ("patched", PATCHED | PATIENT | PROBING)):
        result = run_job(Job([stage], env=env, allow_async=True, **job), folder / name)
        yield result["stages"][stage["name"]]["runs"]["run"]


@pytest.mark.parametrize(
    ("job", "path"),
    [
        pytest.param("v1", "sync", marks=pytest.mark.nightly),
        ("v1", "async"),
        pytest.param("v2", "async", marks=pytest.mark.nightly),
    ],
)
def test_runaways_into_the_limit_are_served_as_stock(job, path, demo_model, tmp_path):
    """Probed at each token to the model's length, thoughts say what they say on a stock engine."""
    stage = runaway_stage(demo_model, path, job, requests=1 if job == "v2" else 3)
    stock, patched = both(stage, tmp_path, model_runner_v2=job == "v2")
    assert token_ids(patched) == token_ids(stock)
    for output in patched["outputs"].values():
        [sample] = output["samples"]
        assert output["prompt_tokens"] + len(sample["ids"]) == MAX_MODEL_LEN[job]
        assert sample["finish_reason"] == "length"
    assert patched["counted"]["probe:measured"] > MAX_MODEL_LEN[job] // 4
    assert "probe:lost" not in patched["counted"]
    assert "fallback:exception" not in patched["counted"]
    assert patched["requests_left"] == patched["blocks_left"] == patched["probes_left"] == 0


def test_probes_wait_for_prompts_where_graphs_run_decodes(demo_model, tmp_path):
    """One request alone brings no prompt, so each probe that is due waits as long as any may."""
    stages = []
    for name, config in (("graphs", {wire.GRAPH_TOKENS: 256}), ("none", {})):
        stage = runaway_stage(demo_model, "async", "v1", requests=1)
        stages.append(
            stage | {"name": name, "engine": stage["engine"] | {"additional_config": config}}
        )
    env = PATCHED | PATIENT | PROBING
    result = run_job(Job(stages, env=env, allow_async=True), tmp_path)["stages"]
    waiting, others = (result[name]["runs"]["run"] for name in ("graphs", "none"))
    most = MAX_MODEL_LEN["v1"] // _MOST_WAITED_STEPS
    assert 2 <= waiting["counted"]["probe:measured"] <= most
    assert others["counted"]["probe:measured"] > 4 * most
    assert token_ids(waiting) == token_ids(others)


@pytest.mark.nightly
def test_probes_leave_the_fused_sampler_to_sampled_requests(demo_model, tmp_path):
    """Model runner V2 sees no greedy request and no seed in any batch, with probes or without."""
    requests = ask_all("s", AMPLE[:2], max_tokens=30, temperature=0.6, min_p=0.01)
    stage = {
        "name": "sampled",
        "engine": engine_arguments(demo_model, max_model_len=512, async_scheduling=True),
        "runs": [{"name": "run", "requests": requests}],
        "watches_sampler": True,
    }
    env = PATCHED | PATIENT | PROBING
    job = Job([stage], env=env, allow_async=True, model_runner_v2=True)
    result = run_job(job, tmp_path)["stages"]["sampled"]
    assert result["runs"]["run"]["counted"]["probe:measured"] > 20
    assert len(result["sampler"]["any_greedy"]) > 20
    assert not any(result["sampler"]["any_greedy"])
    assert not any(result["sampler"]["any_explicit_seed"])
