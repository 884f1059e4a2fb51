"""What the tap measures is what vLLM says of the same logits, on every path through the worker."""

import math

import pytest
from engine_plans import AMPLE, PATIENT
from run_engine import PATCHED, Job, run_job
from workloads import ask, ask_all, engine_arguments

pytestmark = pytest.mark.engine

# The scheduler's own plans are left out: these tests make them.
ALONE = PATCHED | PATIENT | {"MERIDIAN_PATCH_SET_EXIT__MODE": "off"}
LOGITS = {"max_logprobs": -1, "logprobs_mode": "raw_logits"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
V1_STAGES = {
    "async": {"async_scheduling": True},
    "ngram": {"speculative_config": NGRAM},
    # A worker process of its own, spawned: it loads the plug-in as a server's would.
    "multiproc": {"async_scheduling": False, "distributed_executor_backend": "mp"},
}


# What samplers do to logits after the tap has seen them. Upstream's CPU rejection sampler spoils
# greedy requests beside sampled ones, and its top-k kernel does not run in the interpreter.
CHANGED = {"temperature": 0.8, "repetition_penalty": 1.3, "min_tokens": 12, "min_p": 0.1}
OTHERS = {"ngram": (), "v2": ({},), "v2_ngram": ({"min_p": 0},)}


def stage(name, engine, problems, max_tokens):
    """A run without a plan, then the same requests measured, and one whose logits are changed."""
    requests = ask_all("a", problems, every_steps=3, max_tokens=max_tokens, logprobs=-1)
    others = [
        ask(f"o{i}", problems[0], max_tokens=max_tokens, logprobs=-1, **(CHANGED | more))
        for i, more in enumerate(OTHERS.get(name, ({"top_k": 7},)))
    ]
    plain = {"name": "plain", "measures": False, "requests": requests}
    measured = {"name": "measured", "measures": True, "requests": [*requests, *others]}
    return {"name": name, "engine": engine, "runs": [plain, measured]}


def on_v1(model, folder, names):
    stages = [
        stage(name, engine_arguments(model, **LOGITS, **V1_STAGES[name]), AMPLE, 60)
        for name in names
    ]
    return run_job(Job(stages, env=ALONE, allow_async=True), folder)


@pytest.fixture(scope="module")
def v1(demo_model, tmp_path_factory):
    return on_v1(demo_model, tmp_path_factory.mktemp("v1"), ["async", "ngram"])


@pytest.fixture(scope="module")
def v1_more(demo_model, tmp_path_factory):
    return on_v1(demo_model, tmp_path_factory.mktemp("v1"), ["multiproc"])


def on_v2(model, folder, name, **changes):
    small = {"max_model_len": 512, "max_num_batched_tokens": 64}
    engine = engine_arguments(model, **small, **LOGITS, **changes)
    alone = [stage(name, engine, AMPLE[:2], 30)]
    return run_job(Job(alone, env=ALONE, allow_async=True, model_runner_v2=True), folder)


@pytest.fixture(scope="module")
def v2(demo_model, tmp_path_factory):
    return on_v2(demo_model, tmp_path_factory.mktemp("v2"), "v2", async_scheduling=True)


@pytest.fixture(scope="module")
def v2_ngram(demo_model, tmp_path_factory):
    return on_v2(demo_model, tmp_path_factory.mktemp("v2"), "v2_ngram", speculative_config=NGRAM)


# The fixture that played each stage.
PLAYED = {
    "async": "v1",
    "ngram": "v1",
    "multiproc": "v1_more",
    "v2": "v2",
    "v2_ngram": "v2_ngram",
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.nightly] * (fixture != "v1"))
        for name, fixture in PLAYED.items()
    ]
)
def seen(request):
    return request.getfixturevalue(PLAYED[request.param])["stages"][request.param]


def close(got, wanted):
    return math.isclose(got, wanted, rel_tol=1e-4, abs_tol=1e-6)


def test_signals_are_those_of_the_logits_that_vllm_returns(seen):
    """Entropy, log-sum-exp, max and boundary probability of every token, against float64."""
    run = seen["runs"]["measured"]
    got = run["signals"]["per_token"]
    assert set(got) == set(run["outputs"])
    for name, output in run["outputs"].items():
        [sample] = output["samples"]
        wanted = sample["signals"]
        assert len(wanted) == len(sample["ids"]) > 8
        for row, expected in zip(got[name][: len(wanted)], wanted, strict=True):
            assert all(map(close, row, expected)), (name, row, expected)


def test_signals_ride_on_the_model_runner_output(seen):
    """Every output with tokens has a row for each; rows that were not sampled are few."""
    signals = seen["runs"]["measured"]["signals"]
    assert signals["outputs"] > 8
    assert signals["bare"] == 0
    assert signals["short"] == 0
    assert signals["tapped"]


def test_a_runner_that_is_not_asked_is_left_alone(seen):
    """Without a plan nothing is measured and nothing of the runner's sampling is replaced."""
    signals = seen["runs"]["plain"]["signals"]
    assert signals["outputs"] > 8
    assert signals["bare"] == signals["outputs"]
    assert signals["tapped"] == []


def test_measuring_changes_no_token(seen):
    """Greedy requests say the same measured as unmeasured."""
    plain, measured = (seen["runs"][name]["outputs"] for name in ("plain", "measured"))
    for name, output in plain.items():
        assert measured[name]["samples"][0]["ids"] == output["samples"][0]["ids"]


@pytest.mark.parametrize(
    ("runner", "name"),
    [("v1", "ngram"), pytest.param("v2_ngram", "v2_ngram", marks=pytest.mark.nightly)],
)
def test_drafts_have_rows_of_their_own(request, runner, name):
    """Under speculation tokens beyond the first are accepted, and rejected drafts are measured."""
    run = request.getfixturevalue(runner)["stages"][name]["runs"]["measured"]
    assert run["accepted"] > 0
    assert run["signals"]["surplus"] > 0
