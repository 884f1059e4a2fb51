"""What closes must stand: drafts of requests that come back, wide masks, tokens that change."""

from dataclasses import replace

import numpy as np
import pytest
from exit_driver import (
    add_drafts,
    exit_driver,
    force_first_rows,
    is_empty,
    only_token,
    thinker,
)
from scheduler_driver import BLOCK_SIZE, THINK_END, THINK_START, WORD, engine_config
from tier_driver import preempt
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

CAPPED = {"EXIT__MAX_THINK_TOKENS": "40", "EXIT__EAT": "false"}
UNDOCUMENTED = {"provenance": "unverified", "source": "a test", "single_token": False}


@pytest.fixture
def long_end(use_family):
    """Thoughts end with a marker of seven tokens."""
    use_family(end="</done>", probe=None, documented_ids=UNDOCUMENTED)


def drive_into_close(driver, name, prompt_tokens, steps=2):
    """Some tokens of the request's close have been forced, and some of them are known."""
    driver.add(thinker(name, 400, prompt_tokens=prompt_tokens, max_tokens=100))
    while not driver.scheduler.early_exit.requests[name].has_close_begun:
        driver.step()
    for _ in range(steps):
        driver.step()
    return driver.scheduler.requests[name]


def has_end(request, end):
    said = tuple(request._output_token_ids)
    return any(said[index : index + len(end)] == end for index in range(len(said)))


def test_drafts_of_a_request_that_comes_back_are_no_tokens(monkeypatch, demo_model, long_end):
    """vLLM gives it some that stand for none where one token is left to compute."""
    add_drafts(monkeypatch)
    driver = exit_driver(monkeypatch, demo_model, is_async=True, **CAPPED)
    force_first_rows(driver)
    end = driver.scheduler.early_exit.forced_closes.sequence
    padded = 0
    # At the length that leaves one token behind full blocks, and at the next one.
    for prompt_tokens in (BLOCK_SIZE + 22, BLOCK_SIZE + 23):
        name = f"r{prompt_tokens}"
        request = drive_into_close(driver, name, prompt_tokens)
        preempt(driver, name)
        drafts = driver.step().scheduled_spec_decode_tokens.get(name)
        padded += drafts == [-1] * 3
        driver.drain()
        assert has_end(request, end)
        # Only what the preemption took back was forced twice.
        assert len([token for who, token in driver.forced if who == name]) == len(end) + 1
    assert padded == 1
    assert is_empty(driver)


def test_a_close_is_for_one_thought(monkeypatch, demo_model):
    """Drafts on the way may end the thought that is to be closed, and begin the next one."""
    add_drafts(monkeypatch)
    driver = exit_driver(monkeypatch, demo_model, is_async=True, **CAPPED)
    force_first_rows(driver)
    driver.add(thinker("r", 400, max_tokens=200))
    watched = driver.scheduler.early_exit.requests["r"]
    while watched.closing is None:
        driver.step()
    request = driver.scheduler.requests["r"]
    [(output, result)] = driver._in_flight
    assert output.scheduled_spec_decode_tokens["r"]
    result.sampled_token_ids[result.req_id_to_index["r"]] = [THINK_END, THINK_START]
    driver.step()
    assert request.output_token_ids[-2:] == [THINK_END, THINK_START]
    assert watched.closing is None
    second = request.num_output_tokens
    driver.drain()
    # The first one left nothing of the bound to the second.
    assert request._output_token_ids.index(THINK_END, second) - second <= 4
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_close_begins_anew_behind_another_token(monkeypatch, demo_model, long_end, is_async):
    """One that was not forced, for whatever reason, stands in the middle of the marker."""
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **CAPPED)
    end = driver.scheduler.early_exit.forced_closes.sequence
    request = drive_into_close(driver, "r", 40)
    force, driver._force = driver._force, lambda output, result: result
    driver.step()
    driver._force = force
    driver.drain()
    assert WORD in request._output_token_ids[40 : 40 + len(end)]
    assert has_end(request, end)
    assert is_empty(driver)


def test_masks_may_be_wider_than_the_logits(monkeypatch, demo_model):
    """Closes share a step with structured output of any backend."""
    driver = exit_driver(monkeypatch, demo_model, **CAPPED)
    closings = driver.scheduler.early_exit.forced_closes
    driver.add(thinker("r", 100))
    while not closings:
        driver.step()
    output = driver.scheduler.schedule()
    # One bit per token of the vocabulary.
    words = -(-driver.scheduler.vllm_config.model_config.get_vocab_size() // 32)
    wide = GrammarOutput(["other"], np.full((1, words + 2), 5, np.int32), None)
    grammar = closings.add_rows(output, wide)
    assert grammar.structured_output_request_ids == ["other", "r"]
    assert grammar.grammar_bitmask[0].tolist() == [5] * (words + 2)
    assert only_token(grammar.grammar_bitmask[1]) == closings.sequence[0]


def test_guidance_masks_are_wider_where_the_tokenizer_is(demo_model):
    """It counts the tokenizer's tokens where these are more than the model's."""
    model_config = engine_config(demo_model, is_async=False, blocks=50).model_config
    tokenizer = cached_tokenizer_from_config(model_config)
    for vocab_size in (len(tokenizer) - 100, len(tokenizer) + 100):
        built = GuidanceBackend._build_ll_tokenizer(tokenizer, vocab_size)
        assert built.vocab_size == max(vocab_size, len(tokenizer))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_thought_that_begins_the_marker_again_and_again_is_closed(
    monkeypatch, demo_model, use_family, is_async
):
    """A close waits for what may become a marker, but not without end: chains derail like this."""
    use_family(end="b7", probe=None, documented_ids=UNDOCUMENTED)
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **CAPPED)
    end = driver.scheduler.early_exit.forced_closes.sequence
    assert end[0] == WORD
    driver.add(thinker("r", 400, max_tokens=100))
    request = driver.scheduler.requests["r"]
    driver.drain()
    assert has_end(request, end)
    assert driver.forced == [("r", token) for token in end]
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_request_whose_kv_load_failed_is_closed(monkeypatch, demo_model, long_end, is_async):
    """vLLM goes on counting the token of the step that failed, which never comes."""
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **CAPPED)
    scheduler, run = driver.scheduler, driver._run
    prompt = thinker("r", 5, prompt_tokens=100)
    driver.add(prompt)
    driver.drain()
    driver.add(replace(prompt, request_id="again", think_tokens=400, max_tokens=100))
    request = scheduler.requests["again"]

    def fail_once(output):
        result = run(output)
        driver._run = run
        ((first, *_),) = scheduler.kv_cache_manager.get_block_ids("again")
        result.kv_connector_output = KVConnectorOutput(invalid_block_ids={first})
        return result

    driver._run = fail_once
    for _ in range(100):
        driver.step()
    assert has_end(request, scheduler.early_exit.forced_closes.sequence)
    assert not scheduler.early_exit.requests["again"].closing
    assert not scheduler.phase_counters.totals.get("fallback:exception")
