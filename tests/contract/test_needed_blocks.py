"""Blocks that a waiting request needs, and that a preemption frees, on vLLM's real KV manager."""

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
from tier_driver import SYNC_AND_ASYNC, driver_for, preempt, step_until
from vllm.v1.request import RequestStatus

from meridian_patch.engine.scheduler.admission_checks import (
    NextStep,
    freed_blocks,
    needed_blocks,
    taken_blocks,
)
from meridian_patch.phase.tracker import Phase


def job(name, seed, *, prompt=60, think=50, answer=20, **more):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer, **more)


@pytest.mark.parametrize("is_hit", [True, False])
def test_what_a_request_needs_is_what_upstream_takes(demo_model, is_hit):
    """With one block less than ``needed_blocks`` says it is not admitted, with as many it is."""
    for spare in (-1, 0):
        driver = driver_for(demo_model, blocks=60, max_num_batched_tokens=2000)
        driver.add(job("runs", 1, prompt=330, think=400))
        driver.step()
        shared = driver.scheduler.requests["runs"].prompt_token_ids[: 319 if is_hit else 0]
        tokens = (*shared, *make_prompt(random.Random(9), 200, thinks=True, shared=9))
        driver.add(Job("new", tokens, 2, 3))
        [new] = driver.scheduler.waiting
        pool = driver.scheduler.kv_cache_manager.block_pool
        needed = needed_blocks(driver.scheduler, new)
        assert needed == -(-len(tokens) // BLOCK_SIZE) - (9 if is_hit else 0)
        pool.get_new_blocks(pool.get_num_free_blocks() - needed - spare)
        driver.scheduler.schedule()
        assert (new.status == RequestStatus.RUNNING) is (spare == 0)


@pytest.mark.parametrize("tail_tokens", [2, 200])
def test_a_block_that_eagle_drops_is_needed(demo_model, tail_tokens):
    """Where EAGLE drafts, the last block of a hit is computed again, in a block of its own."""
    for spare in (-1, 0):
        driver = driver_for(demo_model, blocks=60, max_num_batched_tokens=2000)
        scheduler = driver.scheduler
        coordinator = scheduler.kv_cache_manager.coordinator
        coordinator.eagle_group_ids = {0}
        coordinator.single_type_managers[0].use_eagle = True
        driver.add(job("runs", 1, prompt=330, think=400))
        driver.step()
        shared = scheduler.requests["runs"].prompt_token_ids[:319]
        tokens = (*shared, *make_prompt(random.Random(9), tail_tokens, thinks=True, shared=9))
        driver.add(Job("new", tokens, 2, 3))
        [new] = scheduler.waiting
        pool = scheduler.kv_cache_manager.block_pool
        needed = needed_blocks(scheduler, new)
        pool.get_new_blocks(pool.get_num_free_blocks() - needed - spare)
        scheduler.schedule()
        assert (new.status == RequestStatus.RUNNING) is (spare == 0)


def test_the_block_of_the_last_known_token_is_needed_though_it_is_held(demo_model):
    """It is computed again, also where the slots of drafts reach behind it."""
    for spare in (-1, 0):
        driver = driver_for(demo_model, blocks=60, max_num_batched_tokens=2000)
        scheduler = driver.scheduler
        scheduler.num_lookahead_tokens = 1
        driver.add(job("runs", 1, prompt=330, think=400))
        driver.step()
        shared = scheduler.requests["runs"].prompt_token_ids[: 10 * BLOCK_SIZE]
        driver.add(Job("new", tuple(shared), None, 3))
        [new] = scheduler.waiting
        pool = scheduler.kv_cache_manager.block_pool
        assert needed_blocks(scheduler, new) == 2
        pool.get_new_blocks(pool.get_num_free_blocks() - 2 - spare)
        scheduler.schedule()
        assert (new.status == RequestStatus.RUNNING) is (spare == 0)


def test_no_room_is_made_for_a_request_on_a_state_that_is_being_computed(demo_model):
    """vLLM admits none to such a step; it comes in behind that."""
    driver = driver_for(
        demo_model,
        blocks=100,
        groups=(full_attention(), aligned_mamba()),
        mamba_cache_mode="align",
        max_num_batched_tokens=4 * BLOCK_SIZE,
    )
    driver.add(job("runs", 1, prompt=10 * BLOCK_SIZE, think=400))
    driver.step()
    shared = driver.scheduler.requests["runs"].prompt_token_ids[: 8 * BLOCK_SIZE]
    tokens = (*shared, *make_prompt(random.Random(9), 60, thinks=True, shared=9))
    driver.add(Job("new", tokens, 2, 3))
    [new] = driver.scheduler.waiting
    pool = driver.scheduler.kv_cache_manager.block_pool
    assert needed_blocks(driver.scheduler, new) > pool.num_gpu_blocks
    for _ in range(5):
        driver.step()
    assert new.status == RequestStatus.RUNNING


@pytest.mark.parametrize("name", ["runs", "later"])
@pytest.mark.parametrize("ahead", [1, 40, 70])
def test_a_preemption_frees_what_no_other_request_holds(demo_model, name, ahead):
    """The one that runs ahead let go of blocks at the start of a window that both have."""
    groups = (full_attention(), sliding_window(4 * BLOCK_SIZE))
    driver = driver_for(demo_model, blocks=120, groups=groups, max_num_batched_tokens=2000)
    scheduler = driver.scheduler
    driver.add(job("runs", 1, prompt=330, think=400))
    driver.add(job("third", 3, prompt=60, think=400))
    step_until(driver, "runs", Phase.THINK, ahead)
    shared = scheduler.requests["runs"].prompt_token_ids[:319]
    tokens = (*shared, *make_prompt(random.Random(9), 80, thinks=True, shared=9))
    driver.add(Job("later", tokens, 400, 3))
    driver.step()
    pool = scheduler.kv_cache_manager.block_pool
    before, request = pool.get_num_free_blocks(), scheduler.requests[name]
    expected = freed_blocks(scheduler, request, scheduler.requests["third"])
    preempt(driver, name)
    assert pool.get_num_free_blocks() - before == expected


@SYNC_AND_ASYNC
@pytest.mark.parametrize("num_later", [0, 1, 3])
def test_running_requests_take_no_more_blocks_than_is_said(demo_model, is_async, num_later):
    """In the next step and so many later ones, with prompts in progress and few that decode."""
    driver = driver_for(demo_model, is_async=is_async, blocks=200, max_num_batched_tokens=96)
    for number in range(6):
        driver.add(job(f"r{number}", number, prompt=30 + 37 * number, think=60))
    scheduler = driver.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    while scheduler.requests:
        most = taken_blocks(scheduler, NextStep(), num_later)
        names = {request.request_id for request in scheduler.running}
        free = pool.get_num_free_blocks()
        for _ in range(1 + num_later):
            driver.step()
        if names != {request.request_id for request in scheduler.running}:
            continue
        assert free - pool.get_num_free_blocks() <= most
