"""vLLM's own features keep working under the patched schedulers, and really take part."""

import re

import pytest
from engine_plans import REGEX
from workloads import THINK_END, sample, texts, token_ids

pytestmark = pytest.mark.engine

BLOCK = 32
each_path = pytest.mark.parametrize(
    "path", (pytest.param("sync", marks=pytest.mark.nightly), "async")
)


@pytest.fixture
def both(v1_stock, v1_patched):
    """``both(stage, run)`` is that run on the stock and on the patched engine."""

    def pick(stage: str, run: str) -> tuple[dict, dict]:
        stock, patched = (result["stages"][stage]["runs"][run] for result in (v1_stock, v1_patched))
        return stock, patched

    return pick


def assert_nothing_left(run: dict) -> None:
    assert run["requests_left"] == 0
    assert run["blocks_left"] == 0
    assert run["routed_left"] == 0


@each_path
def test_chunked_prefill(both, path):
    """A prompt longer than the step's token budget is computed in several steps."""
    stock, patched = both(path, "chunked")
    assert patched["outputs"]["c"]["prompt_tokens"] > 2 * patched["max_step_tokens"]
    assert patched["prefill_steps"]["c"] == stock["prefill_steps"]["c"] > 2
    assert token_ids(patched) == token_ids(stock)


@each_path
def test_prefix_caching(both, path):
    """A repeated prompt comes from the cache, all full blocks of it, and says the same."""
    _, first = both(path, "chunked")
    stock, again = both(path, "cached")
    prompt_tokens = again["outputs"]["c"]["prompt_tokens"]
    assert again["outputs"]["c"]["cached_tokens"] == (prompt_tokens - 1) // BLOCK * BLOCK > 0
    assert again["outputs"]["c"]["cached_tokens"] == stock["outputs"]["c"]["cached_tokens"]
    assert token_ids(again) == token_ids(first)


@each_path
def test_reset_prefix_cache(both, path):
    """Resetting an idle engine's cache succeeds, and the repeated prompt is computed again."""
    _, first = both(path, "chunked")
    _, run = both(path, "reset_idle")
    assert run["events"][0]["result"] is True
    assert run["outputs"]["c"]["cached_tokens"] == 0
    assert token_ids(run) == token_ids(first)


@each_path
def test_reset_prefix_cache_of_running_requests(both, path):
    """Running requests are preempted by a reset, start over, and say the same."""
    _, ample = both(path, "ample")
    _, run = both(path, "reset_running")
    assert run["events"][0]["result"] is True
    assert {entry["name"] for entry in run["preemptions"]} == set(run["outputs"])
    assert texts(run) == texts(ample)
    assert run["misrouted"] == 0
    assert_nothing_left(run)


@each_path
def test_several_samples(both, path):
    """n=4 gives four finished samples of one prompt, each with a phase of its own."""
    _, run = both(path, "samples")
    assert len(run["outputs"]["n"]["samples"]) == 4
    assert all(entry["finish_reason"] for entry in run["outputs"]["n"]["samples"])
    assert len(run["routed"]) == 4
    assert run["misrouted"] == 0
    assert_nothing_left(run)


def said(run, name):
    """A request's output without what is told of its times."""
    return {key: value for key, value in sample(run, name).items() if key != "meridian"}


@each_path
def test_abort(both, path):
    """An aborted request ends where it was, frees all it held, and disturbs no other."""
    _, ample = both(path, "ample")
    _, run = both(path, "abort")
    assert not run["outputs"]["a1"]["finished"]
    assert 0 < len(sample(run, "a1")["ids"]) < len(sample(ample, "a1")["ids"])
    for name in ("a0", "a2"):
        assert said(run, name) == said(ample, name)
    assert_nothing_left(run)


@each_path
def test_pause_and_resume(both, path):
    """A paused engine produces nothing; resumed, it goes on to the same outputs."""
    _, ample = both(path, "ample")
    _, run = both(path, "pause")
    _, settled, later, _ = run["events"]
    assert 0 < settled["produced"] == later["produced"]
    assert texts(run) == texts(ample)
    assert_nothing_left(run)


def test_priority_policy(both):
    """With two places, waiting requests are admitted by priority, smallest number first."""
    stock, patched = both("priority", "priority")
    by_start = sorted(patched["first_step"], key=patched["first_step"].get)
    assert set(by_start[:2]) == {"r1", "r2"}
    assert by_start[2:] == ["r3", "r4", "r5"]
    assert patched["first_step"] == stock["first_step"]
    assert token_ids(patched) == token_ids(stock)


def test_structured_output(both):
    """With a reasoning parser the thought is free and the answer matches the regex."""
    stock, patched = both("priority", "structured")
    thought, end, answer = sample(patched, "s")["text"].partition(THINK_END)
    assert thought
    assert end
    assert re.fullmatch(REGEX, answer)
    assert token_ids(patched) == token_ids(stock)


def test_ngram_speculative_decoding(v1_patched, both):
    """Drafts are verified and accepted in batches, and greedy output is that without drafts."""
    stock, patched = both("ngram", "ample")
    plain = v1_patched["stages"]["async"]["runs"]["ample"]
    assert patched["drafted"] >= patched["accepted"] > 0
    assert token_ids(patched) == token_ids(stock) == token_ids(plain)
    assert patched["misrouted"] == 0
    assert_nothing_left(patched)


def test_abort_on_model_runner_v2(v2_stock, v2_patched):
    """Abort works there too: the others' outputs are stock's, and nothing is left."""
    stock, patched = (
        result["stages"]["async"]["runs"]["abort"] for result in (v2_stock, v2_patched)
    )
    assert not patched["outputs"]["a1"]["finished"]
    for name in ("a0", "a2"):
        # Stock does not count reasoning tokens.
        ours = said(patched, name)
        ours.pop("reasoning_tokens")
        assert ours == said(stock, name)
    assert_nothing_left(patched)
