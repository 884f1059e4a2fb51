"""Structured output and forced closes on the real engine, with xgrammar, in both runners."""

import re

import pytest
from engine_plans import PATIENT
from run_engine import PATCHED, Job, run_job
from workloads import ask, engine_arguments

from meridian_patch.demo.problems import make_problems

pytestmark = pytest.mark.engine

THINK_START, THINK_END = 256, 257
CAP = 40
# A close is due in every thought; nothing is probed.
ENFORCE = {
    "EXIT__MODE": "enforce",
    "EXIT__MAX_THINK_TOKENS": str(CAP),
    "EXIT__MIN_THINK_TOKENS": "0",
    "EXIT__EAT": "false",
    "EXIT__RPDI": "false",
}
SETTINGS = {f"MERIDIAN_PATCH_SET_{name}": value for name, value in ENFORCE.items()}
PROBLEMS = make_problems(2, seed=5, steps=6)
ANSWER = r"\d!{4}"
# What may be said in a thought, longer than the cap.
LINES = r"[^<>]{70}"
# The grammar has the boundary in it, and may come to it at any time.
OWN_END = r"[^<>]{1,200}</think>\d!{4}"
WAYS = {
    "sync": {"async_scheduling": False},
    "async": {"async_scheduling": True},
    "v2": {"async_scheduling": True, "max_model_len": 512, "max_num_batched_tokens": 64},
}
# Two ways of binding differ in when the grammar is asked, not in how the model runner applies it.
BOUND = [
    pytest.param("async", "without a parser", marks=pytest.mark.nightly),
    pytest.param("async", "in reasoning", marks=pytest.mark.nightly),
    pytest.param("v2", "in reasoning", marks=pytest.mark.nightly),
    pytest.param("sync", "without a parser", marks=pytest.mark.nightly),
    pytest.param("sync", "in reasoning", marks=pytest.mark.nightly),
    pytest.param("v2", "without a parser", marks=pytest.mark.nightly),
]
WAITS = {"reasoning_parser": "qwen3"}
BINDS = {
    "without a parser": {},
    "in reasoning": {
        "reasoning_parser": "qwen3",
        "structured_outputs_config": {"enable_in_reasoning": True},
    },
}


def run(model, folder, way, engine, regexes):
    requests = [
        ask(f"{name}{n}", problem, regex=regex, max_tokens=160)
        for name, regex in regexes.items()
        for n, problem in enumerate(PROBLEMS)
    ]
    # One that no grammar binds is in the same steps.
    requests.append(ask("free", PROBLEMS[0], max_tokens=160))
    stage = {
        "name": "s",
        "engine": engine_arguments(model, **WAYS[way], **engine),
        "runs": [{"name": "run", "requests": requests}],
    }
    job = Job(
        [stage], env=PATCHED | PATIENT | SETTINGS, allow_async=True, model_runner_v2=way == "v2"
    )
    return run_job(job, folder)["stages"]["s"]["runs"]["run"]


def sample(run, name):
    [sample] = run["outputs"][name]["samples"]
    return sample


def is_closed(sample):
    """The thought has a boundary, near the cap."""
    ids = sample["ids"]
    return ids.count(THINK_END) == 1 and CAP - 8 <= ids.index(THINK_END) <= CAP + 3


def assert_free_is_closed(run):
    assert is_closed(sample(run, "free"))
    assert "fallback:exception" not in run["counted"]
    assert run["watched_left"] == run["requests_left"] == 0


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("sync", marks=pytest.mark.nightly),
        "async",
        pytest.param("v2", marks=pytest.mark.nightly),
    ],
)
def test_a_grammar_begins_right_behind_a_forced_boundary(demo_model, tmp_path, way):
    """With a reasoning parser the grammar waits: the thought is closed, the answer is its own."""
    done = run(demo_model, tmp_path, way, WAITS, {"s": ANSWER})
    for name in ("s0", "s1"):
        made = sample(done, name)
        assert is_closed(made)
        assert re.fullmatch(ANSWER, made["text"].split("</think>")[1]), made["text"]
        assert made["finish_reason"] == "stop"
    assert not [name for name in done["counted"] if name.startswith("exit_given_up")]
    assert_free_is_closed(done)


@pytest.mark.parametrize(("way", "why"), BOUND)
def test_a_grammar_that_binds_the_thought_is_asked(demo_model, tmp_path, way, why):
    """A close that it rejects is given up, and the request ends as it should; others are closed."""
    done = run(demo_model, tmp_path, way, BINDS[why], {"s": LINES, "own": OWN_END})
    for name in ("s0", "s1"):
        made = sample(done, name)
        assert made["finish_reason"] == "stop", made
        assert re.fullmatch(LINES, made["text"], re.DOTALL), made["text"]
    for name in ("own0", "own1"):
        made = sample(done, name)
        assert made["finish_reason"] == "stop", made
        assert is_closed(made)
        assert re.fullmatch(OWN_END, made["text"], re.DOTALL), made["text"]
    assert done["counted"]["exit_given_up:grammar"] == 2
    assert_free_is_closed(done)
