"""How steps are made up: prompts whole or in chunks, drafts, priorities, caching."""

import pytest
from matrix_checks import assert_works, probed
from matrix_plans import cell as stage
from matrix_plans import crowd

from meridian_patch.demo.problems import make_problems

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1200)]

# The reasoner thinks about these for longer: with drafts a thought takes few steps.
LONG = make_problems(16, seed=21, steps=6)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def by_priority():
    run = crowd()
    for number, request in enumerate(run["requests"]):
        request["priority"] = -(number % 3)
    return run


@pytest.fixture(scope="module")
def steps(both_jobs, tiny):
    dense, is_async = tiny("dense"), {"async_scheduling": True}
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}
    short = {"long_prefill_token_threshold": 16, "max_num_batched_tokens": 128}
    priority = {"scheduling_policy": "priority"}
    return both_jobs(
        "steps",
        [
            stage("whole", dense, **whole, **is_async),
            stage("short", dense, **short, **is_async),
            stage("priority", dense, [by_priority()], **priority, **is_async),
            stage("uncached", dense, enable_prefix_caching=False, **is_async),
        ],
    )


@pytest.fixture(scope="module")
def drafted(both_jobs, demo_model):
    """The reasoner repeats itself, and drafts for itself as well as can be."""
    drafts = {"method": "draft_model", "model": str(demo_model), "num_speculative_tokens": 2}
    # vLLM's CPU build takes no bias with drafts, and starts no engine behind one with ngram.
    runs = [crowd(has_bias=False, problems=LONG)]
    return both_jobs(
        "drafted",
        [
            stage("draft", demo_model, runs, speculative_config=drafts),
            stage("ngram", demo_model, runs, speculative_config=NGRAM),
        ],
    )


def test_chunked_prefill_off(steps, cell):
    """Each prompt is computed in one step, and none waits for answers to end."""
    pair = steps["whole"]
    note = assert_works(pair)
    _, patched = pair.runs("crowd")
    assert {n for r, n in patched["prefill_steps"].items() if r not in preempted(patched)} == {1}
    cell.works("chunked prefill off", note, probed(pair))


def preempted(run):
    return {entry["name"] for entry in run["preemptions"]}


def test_long_prefill_token_threshold(steps, cell):
    """Prompts that share a step with others take no more of it than the threshold."""
    pair = steps["short"]
    note = assert_works(pair)
    _, patched = pair.runs("crowd")
    chunked = [name for name, number in patched["prefill_steps"].items() if number > 1]
    assert len(chunked) > len(patched["prefill_steps"]) // 2
    cell.works("`long_prefill_token_threshold`", note, probed(pair))


def test_priority_scheduling(steps, cell):
    pair = steps["priority"]
    cell.works("priority scheduling", assert_works(pair), probed(pair))


def test_prefix_caching_off(steps, cell):
    """Tiers and EAT have nothing to work with, and the log says so."""
    pair = steps["uncached"]
    note = assert_works(pair, probes=False)
    assert "KV tiers are inactive: prefix caching is off" in pair.log
    assert "EAT is off, thoughts are not probed: prefix caching is off" in pair.log
    cell.works("prefix caching off", f"{note}; tiers off, with a notice", "off, with a notice")


@pytest.mark.parametrize(("kind", "name"), [("ngram", "ngram"), ("draft", "draft model")])
def test_speculation(drafted, cell, kind, name):
    """Drafts were made and accepted, and outputs are stock's."""
    pair = drafted[kind]
    note = assert_works(pair)
    _, patched = pair.runs("crowd")
    assert patched["accepted"] > 10
    cell.works(name, f"{note}; {patched['accepted']} drafts accepted", probed(pair))
