"""What stands behind our masks in vLLM's samplers: a close comes through it, or is given up."""

import pytest
from engine_plans import PATIENT
from run_engine import PATCHED, Job, run_job
from workloads import ask, engine_arguments

from meridian_patch.demo.problems import make_problems

pytestmark = pytest.mark.engine

THINK_END, CAP = 257, 40
ENFORCE = {
    "EXIT__MODE": "enforce",
    "EXIT__MAX_THINK_TOKENS": str(CAP),
    "EXIT__MIN_THINK_TOKENS": "0",
    "EXIT__EAT": "false",
    "EXIT__RPDI": "false",
}
SETTINGS = {f"MERIDIAN_PATCH_SET_{name}": value for name, value in ENFORCE.items()}
[PROBLEM] = make_problems(1, seed=5, steps=6)
WAYS = {
    "async": {"async_scheduling": True},
    "v2": {"async_scheduling": True, "max_model_len": 512, "max_num_batched_tokens": 64},
}
CLOSED = {
    "bias": {"logit_bias": {THINK_END: -100.0, ord("a"): 100.0}},
    "penalties": {
        "repetition_penalty": 1.5,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
    },
    "min_p": {"temperature": 1.0, "min_p": 0.5},
    "top": {"temperature": 1.0, "top_k": 1, "top_p": 0.5},
    "allowed": {"allowed_token_ids": [*range(256), THINK_END]},
    "min_tokens": {"min_tokens": 100},
    "stops there": {"stop_token_ids": [THINK_END]},
}
GIVEN_UP = {
    "stop_ids": ({"stop_token_ids": [THINK_END], "min_tokens": 100}, "min_tokens"),
    "allowed_only": ({"allowed_token_ids": list(range(256))}, "allowed_tokens"),
    "bad": ({"bad_words": ["</think>"]}, "bad_words"),
    "budget": ({"thinking_token_budget": CAP - 3}, "budget"),
}


def run(model, folder, way, requests, **engine):
    arguments = engine_arguments(model, reasoning_parser="qwen3", **WAYS[way], **engine)
    stage = {"name": "s", "engine": arguments, "runs": [{"name": "run", "requests": requests}]}
    job = Job(
        [stage], env=PATCHED | PATIENT | SETTINGS, allow_async=True, model_runner_v2=way == "v2"
    )
    return run_job(job, folder)["stages"]["s"]["runs"]["run"]


def ids(done, name):
    [sample] = done["outputs"][name]["samples"]
    return sample["ids"]


@pytest.mark.parametrize("way", ["async", pytest.param("v2", marks=pytest.mark.nightly)])
def test_a_close_comes_through_or_is_given_up(demo_model, tmp_path, way):
    """No request's other wishes make a forced token another one."""
    # vLLM's kernel for top_k and top_p does not run in Triton's interpreter.
    closed = {name: wishes for name, wishes in CLOSED.items() if way != "v2" or name != "top"}
    asked = [ask(name, PROBLEM, max_tokens=150, **wishes) for name, wishes in closed.items()]
    asked += [
        ask(name, PROBLEM, max_tokens=150, **wishes) for name, (wishes, _) in GIVEN_UP.items()
    ]
    done = run(demo_model, tmp_path, way, asked)
    for name in closed:
        assert THINK_END in ids(done, name), name
        assert CAP - 8 <= ids(done, name).index(THINK_END) <= CAP + 3, name
    assert ids(done, "stops there")[-1] == THINK_END
    assert THINK_END not in ids(done, "stop_ids")[:100]
    assert THINK_END not in ids(done, "allowed_only")
    assert ids(done, "budget").count(THINK_END) == 1
    # Nothing but what the model says: it never says the first id of all.
    assert not any(0 in sample["ids"] for o in done["outputs"].values() for sample in o["samples"])
    given_up = {n: c for n, c in done["counted"].items() if n.startswith("exit_given_up")}
    assert given_up == {f"exit_given_up:{why}": 1 for _, why in GIVEN_UP.values()}
    assert "fallback:exception" not in done["counted"]


@pytest.mark.nightly
def test_custom_logits_processors_may_undo_a_close(demo_model, tmp_path):
    """With one in the server no close is forced, and the thought goes on as it would."""
    processors = ["forbidding_processor:Forbidding"]
    asked = [ask("r", PROBLEM, max_tokens=150)]
    done = run(demo_model, tmp_path, "async", asked, logits_processors=processors)
    assert THINK_END not in ids(done, "r")
    assert 0 not in ids(done, "r")
    assert done["counted"]["exit_given_up:logits_processors"] == 1
