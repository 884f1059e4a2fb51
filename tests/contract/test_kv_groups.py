"""The real scheduler and KV manager: tiers in every cache group, KV events, and damage."""

from collections import Counter

import pytest
from queue_watch import link_faults
from scheduler_driver import (
    BLOCK_SIZE,
    Driver,
    engine_config,
    full_attention,
    sliding_window,
)
from tier_driver import (
    BLOCKS,
    SYNC_AND_ASYNC,
    THINKER,
    counted,
    driver_for,
    load,
    logged,
    pool_of,
    scheduler_class,
    step_until,
    tiers_of,
    turn,
)
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from meridian_patch.engine import status
from meridian_patch.engine.kv_cache import tiers as tiers_module
from meridian_patch.engine.kv_cache.free_queue import unlink
from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.retention import Tier

pytestmark = pytest.mark.usefixtures("patience")


def hold_a_free_block(pool):
    pool.free_block_queue.get_all_free_blocks()[3].ref_cnt = 1


def lose_a_free_block(pool):
    queue = pool.free_block_queue
    queue.remove(queue.get_all_free_blocks()[3])


def drop_a_link(pool):
    pool.free_block_queue.get_all_free_blocks()[3].prev_free_block = None


def close_a_ring(pool):
    third, fourth = pool.free_block_queue.get_all_free_blocks()[2:4]
    fourth.next_free_block = third


def miscount(pool):
    pool.free_block_queue.num_free_blocks += 1


def lose_a_fence(pool):
    unlink(pool.free_block_queue.fences[1])


def let_go_too_often(pool):
    pool.free_block_queue.get_all_free_blocks()[3].ref_cnt = -1


@pytest.mark.parametrize(
    "damage",
    [
        hold_a_free_block,
        lose_a_free_block,
        drop_a_link,
        close_a_ring,
        miscount,
        lose_a_fence,
        let_go_too_often,
    ],
)
def test_damage_is_found_when_no_request_runs_and_turns_tiers_off(
    monkeypatch, demo_model, caplog, damage
):
    """One error that says so, one count, and every later decision is stock."""
    driver = driver_for(demo_model)
    manager = driver.scheduler.kv_cache_manager
    now = 0.0
    manager.clock = lambda: now
    turn(driver, THINKER)
    assert find_faults(pool_of(driver)) == []
    damage(pool_of(driver))
    assert find_faults(pool_of(driver))
    with logged(caplog):
        driver.scheduler.schedule()
        assert "not in order" not in caplog.text, "the check interval is not over"
        now = 1e9
        driver.scheduler.schedule()
        now = 2e9
        driver.scheduler.schedule()
    assert caplog.text.count("KV tiers are off from now on") == 1
    assert counted(driver, "fallback") == {"kv_integrity": 1}
    assert counted(driver, "part_off") == {"the KV tiers": 1}
    assert driver.scheduler.kv_tiers.history == "keep"
    assert status._report["kv_tiers"] == "off"
    # Another engine in this process has tiers again.
    driver_for(demo_model)
    assert status._report["kv_tiers"] != "off"
    assert status._report["kv_tiers_off"] is None


HYBRID = (full_attention(BLOCK_SIZE), sliding_window(48, BLOCK_SIZE // 2))


@SYNC_AND_ASYNC
def test_every_cache_group_gets_the_requests_tiers(demo_model, is_async):
    """Full attention and a sliding window of another block size, in one pool."""
    driver = driver_for(demo_model, is_async=is_async, blocks=60, groups=HYBRID)
    first_thought = len(THINKER.prompt) - 1
    driver.add(THINKER)
    step_until(driver, "thinker", Phase.THINK, tokens=100)
    pool = pool_of(driver)
    # Left by the window while it runs: not even its resume needs them.
    skipped = tiers_of(driver)[Tier.THINK_COMPLETE]
    assert len(skipped) > 1
    assert {get_group_id(pool.blocks[i].block_hash) for i in skipped} == {1}
    driver.drain()
    tiers = tiers_of(driver)
    groups = Counter()
    for tier, ids in tiers.items():
        for block in map(pool.blocks.__getitem__, ids):
            expected = block.block_hash_num_tokens > first_thought
            assert tier is (Tier.THINK_COMPLETE if expected else Tier.OUTPUT_CRITICAL)
            groups[tier, get_group_id(block.block_hash)] += 1
    assert all(groups[tier, group] for tier in (0, 2) for group in (0, 1))
    assert find_faults(pool) == []


def test_skipped_blocks_whose_tier_cannot_be_told(demo_model, monkeypatch):
    """They go where stock puts them, and the request goes on."""

    def fails(*_):
        raise RuntimeError("cannot tell")

    monkeypatch.setattr(tiers_module, "retain_skipped", fails)
    driver = driver_for(demo_model, blocks=60, groups=HYBRID)
    driver.add(THINKER)
    driver.drain()
    assert len(driver.deliveries["thinker"]) > 100
    assert counted(driver, "part_off") == {"the KV tiers": 1}
    assert find_faults(pool_of(driver)) == []


@pytest.mark.parametrize("first", [0, 1], ids=["full-first", "window-first"])
@SYNC_AND_ASYNC
def test_cache_groups_under_pressure(demo_model, is_async, first):
    """Preemptions, aborts and resets with two groups leave every link and count in order."""
    groups = HYBRID if first == 0 else HYBRID[::-1]
    driver = driver_for(demo_model, is_async=is_async, blocks=40, groups=groups)
    pool = pool_of(driver)

    def check():
        assert find_faults(pool) == []

    for seed in (1, 2):
        load(driver, seed, after_step=check)
    queue = pool.free_block_queue
    assert not queue.assigned
    assert not list(link_faults(queue))
    assert driver.hits + driver.preempted_hits == sum(counted(driver, "kv_hit_tokens").values())
    assert counted(driver, "preemption")
    assert len(counted(driver, "kv_eviction")) > 1
    assert not counted(driver, "fallback")


class Mirror:
    """The cache as a subscriber of KV events sees it: how many blocks hold a hash."""

    def __init__(self):
        self.cached = Counter()
        self.removed = 0

    def apply(self, events):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.cached.clear()
                continue
            keys = [(block_hash, event.group_idx) for block_hash in event.block_hashes]
            if isinstance(event, BlockStored):
                self.cached.update(keys)
            else:
                assert isinstance(event, BlockRemoved)
                self.cached.subtract(keys)
                self.removed += len(keys)
                assert self.cached[keys[0]] >= 0
        self.cached = +self.cached


def cached_in(pool):
    return Counter(
        {
            (maybe_convert_block_hash(get_block_hash(key)), get_group_id(key)): 1
            if isinstance(held, KVCacheBlock)
            else len(held)
            for key, held in pool.cached_block_hash_to_block._cache.items()
        }
    )


@pytest.mark.parametrize("kind", ["tiers", "tiers-hybrid", "stock"])
@SYNC_AND_ASYNC
def test_kv_events_tell_what_is_cached(demo_model, is_async, kind):
    """A mirror built from the events equals the cache after each of many steps."""
    # Not cached: a configuration of events has no hash.
    config = engine_config.__wrapped__(
        demo_model,
        is_async=is_async,
        # One that resumes wants blocks in every group at once; the longest must find them.
        blocks=2 * BLOCKS if kind == "tiers-hybrid" else BLOCKS,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    stock = AsyncScheduler if is_async else Scheduler
    driver = Driver.build(
        stock if kind == "stock" else scheduler_class(is_async=is_async),
        config,
        is_async=is_async,
        tiered=kind != "stock",
        groups=HYBRID if kind == "tiers-hybrid" else (),
    )
    mirror, pool = Mirror(), pool_of(driver)
    steps = 0

    def follow():
        nonlocal steps
        steps += 1
        mirror.apply(driver.kv_events)
        driver.kv_events.clear()
        mirror.apply(driver.scheduler.kv_cache_manager.take_events())
        assert mirror.cached == cached_in(pool)

    for seed in (3, 4):
        load(driver, seed, after_step=follow)
    follow()
    assert steps > 500
    assert mirror.removed > 100
