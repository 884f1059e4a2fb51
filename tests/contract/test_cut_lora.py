"""Cuts beside LoRA adapters, which vLLM counts over the requests of one step alone."""

import random

import pytest
from scheduler_driver import (
    BLOCK_SIZE,
    Job,
    aligned_mamba,
    full_attention,
    make_prompt,
    sliding_window,
)
from stub_connector import StubConnector
from tier_driver import driver_for, pool_of, preempt, step_until
from vllm.lora.request import LoRARequest

from meridian_patch.engine.upstream import is_release
from meridian_patch.phase.tracker import Phase

# A step that answers has room for a block of a prompt and half of the next.
SETTINGS = {
    "ANSWER_ITL_MS": "15",
    "MIN_PREFILL_TOKENS": "1",
    "DRAIN_S": "100000",
    "TIME_BUDGET_US": "10000000",
}
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
LONG = 40 * BLOCK_SIZE + 5


@pytest.fixture
def cut(demo_model, monkeypatch):
    """Cut steps of a model whose prompts are computed in whole blocks; one adapter at a time."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name}", value)
    driver = driver_for(
        demo_model,
        blocks=600,
        groups=(full_attention(), aligned_mamba()),
        max_num_seqs=48,
        mamba_cache_mode="align",
        long_prefill_token_threshold=2 * BLOCK_SIZE,
        **LORA,
    )
    for number in range(12):
        add(driver, f"lesson{number}", 0, 50 + 40 * number)
        driver.drain()
    return driver


def add(driver, name, adapter, prompt, think=5, answer=5):
    tokens = make_prompt(random.Random(name), prompt, thinks=True, shared=sum(map(ord, name)))
    driver.add(Job(name, tuple(tokens), think, answer))
    if adapter:
        request = driver.scheduler.requests[name]
        request.lora_request = LoRARequest(f"adapter{adapter}", adapter, f"adapter{adapter}")


def read_beside_prompts(driver):
    """An answer is being read; of two long prompts each cut step computes the first one alone."""
    add(driver, "reader", 0, 20, think=12, answer=1000)
    driver.step()
    add(driver, "first", 0, LONG)
    add(driver, "second", 1, LONG)
    step_until(driver, "reader", Phase.ANSWER)
    while "second" in driver.step().num_scheduled_tokens:
        pass


def test_no_other_adapter_comes_in_while_a_cut_passes_one_over(cut):
    """Both would be in a step later, and vLLM stops at more adapters than it has slots for."""
    read_beside_prompts(cut)
    add(cut, "other", 2, 4, think=200)
    cut.drain()
    assert cut.deliveries["second"][-1] < cut.deliveries["other"][0]
    assert not cut.scheduler.phase_counters.totals.get("fallback:exception")


def test_vllm_counts_the_adapters_of_all_that_run_from_0_33_on(cut):
    """A request without an adapter need not wait for the one that a cut passes over."""
    read_beside_prompts(cut)
    add(cut, "other", 2, 4, think=200)
    add(cut, "plain", 0, 4, think=200)
    cut.drain()
    is_beside = cut.deliveries["plain"][0] < cut.deliveries["first"][0]
    assert is_beside is is_release("0.33")
    assert not cut.scheduler.phase_counters.totals.get("fallback:exception")


def test_where_adapters_have_slots_others_come_in_beside_a_cut(cut):
    """As many adapters as slots are never too many."""
    read_beside_prompts(cut)
    add(cut, "plain", 0, 4, think=200)
    cut.drain()
    assert cut.deliveries["plain"][0] < cut.deliveries["second"][0]
    assert not cut.scheduler.phase_counters.totals.get("fallback:exception")


def test_others_come_in_beside_a_cut_that_leaves_no_prompt_out(cut):
    """A step computes as many tokens of a prompt as it may, and the cut has room for more."""
    add(cut, "reader", 0, 20, think=12, answer=1000)
    cut.step()
    add(cut, "long", 1, LONG)
    step_until(cut, "reader", Phase.ANSWER)
    add(cut, "other", 2, 4, think=200)
    add(cut, "plain", 0, 4, think=200)
    budget = cut.scheduler.policy_parts.cut._cut
    budget.token_budget = lambda *_, **__: 4 * BLOCK_SIZE
    cut.drain()
    assert cut.deliveries["plain"][0] < cut.deliveries["long"][0]
    assert not cut.scheduler.phase_counters.totals.get("fallback:exception")


def test_an_answer_that_waits_ends_the_cut(cut):
    """It comes in although a prompt with an adapter is being computed."""
    read_beside_prompts(cut)
    preempt(cut, "reader")
    steps = 0
    while "reader" not in cut.step().num_scheduled_tokens:
        steps += 1
    assert steps <= 1
    assert "second" in cut.scheduler.requests
    cut.drain()
    assert not cut.scheduler.phase_counters.totals.get("fallback:exception")


@pytest.mark.parametrize(
    ("groups", "num_free"),
    [((), 6), ((full_attention(), sliding_window(512, 8)), 30)],
    ids=["blocks of one size", "blocks of two sizes"],
)
def test_no_other_adapter_comes_in_while_one_gets_no_block(
    demo_model, monkeypatch, groups, num_free
):
    """vLLM preempts none, goes on to the waiting ones, and meets both adapters a step later."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_SHARING", "false")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US", "10000000")
    driver = driver_for(demo_model, blocks=600, groups=groups, **LORA)
    scheduler, pool = driver.scheduler, pool_of(driver)
    scheduler.connector = StubConnector(frees_blocks=True)
    scheduler.scheduler_reserve_full_isl = False
    add(driver, "long", 1, 30 * BLOCK_SIZE, think=300)
    driver.step()
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - num_free)
    add(driver, "other", 2, 20, think=300)
    for _ in range(3):
        assert "other" not in driver.step().num_scheduled_tokens
    pool.free_blocks(taken)
    for _ in range(5):
        driver.step()
    assert driver.deliveries["long"]
