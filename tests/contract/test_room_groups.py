"""Room where blocks are shared or of several cache groups, on vLLM's real scheduler."""

import random

import pytest
from full_pool import filled_driver, job, newcomer, num_preempted_for_room, share_time_alone
from scheduler_driver import (
    BLOCK_SIZE,
    Job,
    aligned_mamba,
    full_attention,
    make_prompt,
    sliding_window,
)
from tier_driver import SYNC_AND_ASYNC, driver_for, step_until
from vllm.v1.request import RequestStatus

from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.engine.scheduler.admission_checks import freed_blocks
from meridian_patch.phase.tracker import Phase


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    share_time_alone(monkeypatch)


HYBRIDS = {
    "full": (full_attention(),),
    "window": (full_attention(), sliding_window(48, BLOCK_SIZE // 2)),
    "window-first": (sliding_window(64), full_attention(), sliding_window(64)),
}


@SYNC_AND_ASYNC
@pytest.mark.parametrize("groups", HYBRIDS)
def test_time_sharing_counts_the_blocks_of_all_groups(demo_model, is_async, groups):
    """A newcomer takes the place of a thinker whatever the cache groups are."""
    specs = HYBRIDS[groups]
    driver = filled_driver(demo_model, is_async=is_async, blocks=60, groups=specs)
    scheduler = driver.scheduler
    assert "time_sharing" in [n for n, on in vars(scheduler.policy_parts.rules).items() if on]
    pool = scheduler.kv_cache_manager.block_pool
    # Nearly all that is left belongs to a request of another engine.
    foreign = pool.get_new_blocks(pool.get_num_free_blocks() - 8)
    driver.add(newcomer(11))
    while not driver.deliveries["new"]:
        driver.step()
    assert "other" in scheduler.requests
    assert num_preempted_for_room(driver) >= 1
    pool.free_blocks(foreign)
    driver.drain()
    assert find_faults(pool) == []


def test_the_step_model_sees_the_context_of_all_groups(demo_model):
    """Held tokens rise as thoughts grow; without groups of one kind they were 0."""
    held = {}
    for name in ("full", "window"):
        driver = driver_for(demo_model, blocks=60, groups=HYBRIDS[name])
        driver.add(job("long", 50, think=700, answer=5))
        step_until(driver, "long", Phase.THINK, 400)
        held[name] = driver.scheduler.policy_parts.load.decodes().context_tokens
    assert 400 < held["full"] < 550
    assert 400 < held["window"] < 700


@SYNC_AND_ASYNC
def test_no_request_makes_room_for_a_prefix_that_it_holds_itself(demo_model, is_async):
    """The blocks that it frees are those that the newcomer did not need while they were held."""
    driver = filled_driver(demo_model, prompt=320, is_async=is_async, blocks=60)
    scheduler = driver.scheduler
    long, other = scheduler.requests["long"], scheduler.requests["other"]
    tokens = (*long.prompt_token_ids[:-1], *make_prompt(random.Random(9), 800, thinks=True))
    driver.add(Job("new", tokens, 2, 3))
    new = scheduler.requests["new"]
    held = len(scheduler.kv_cache_manager.get_blocks("long").blocks[0])
    pool = scheduler.kv_cache_manager.block_pool
    # As few as suffice by what it holds, and not by what it holds beside the newcomer's prefix.
    needed = -(-len(tokens) // BLOCK_SIZE) - 9
    pool.get_new_blocks(pool.get_num_free_blocks() - needed + held - 2)
    other.priority = -1
    for _ in range(20):
        driver.step()
    assert new.status != RequestStatus.RUNNING
    assert not num_preempted_for_room(driver)
    manager = scheduler.kv_cache_manager
    prefix = scheduler.policy_parts.refusals.prefix_of(new)
    held = len(manager.get_blocks("long").blocks[0])
    assert freed_blocks(manager, "long", prefix) == held - 9
    assert freed_blocks(manager, "long") == held


@SYNC_AND_ASYNC
def test_no_request_makes_room_for_a_recurrent_prefix_that_it_holds_itself(demo_model, is_async):
    """With a cached state behind it, the newcomer does not need the prefix while it is held."""
    driver = filled_driver(
        demo_model,
        prompt=10 * BLOCK_SIZE,
        names=("long", "other"),
        is_async=is_async,
        blocks=80,
        groups=(full_attention(), aligned_mamba()),
        mamba_cache_mode="align",
        max_num_batched_tokens=4 * BLOCK_SIZE,
    )
    scheduler = driver.scheduler
    long, other = scheduler.requests["long"], scheduler.requests["other"]
    shared = long.prompt_token_ids[: 8 * BLOCK_SIZE]
    driver.add(Job("new", (*shared, *make_prompt(random.Random(9), 800, thinks=True)), 2, 3))
    new = scheduler.requests["new"]
    manager = scheduler.kv_cache_manager
    blocks = manager.get_blocks("long").blocks
    held = sum(not block.is_null for group in blocks for block in group)
    pool = manager.block_pool
    # As few as suffice by what it holds, and not by what it holds beside the newcomer's prefix.
    # 33 blocks and a state: without the 8 that are held, and with the state that is not.
    pool.get_new_blocks(pool.get_num_free_blocks() - (33 - 8 + 2) + held - 4)
    other.priority = -1
    for _ in range(20):
        driver.step()
    assert new.status != RequestStatus.RUNNING
    assert not num_preempted_for_room(driver)
    prefix = scheduler.policy_parts.refusals.prefix_of(new)
    assert freed_blocks(manager, "long") - freed_blocks(manager, "long", prefix) == 8
