"""The real scheduler and KV manager with tiers, and what to read off their free blocks."""

import logging
import random

import pytest
from queue_watch import walk_tiers
from scheduler_driver import Driver, Job, engine_config, make_prompt
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.policy.retention import Tier

# One block is vLLM's null block.
BLOCKS = 24
SYNC_AND_ASYNC = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
# For slow tests: asynchronous scheduling is what vLLM does unless told otherwise.
ASYNC_AND_NIGHTLY_SYNC = pytest.mark.parametrize(
    "is_async",
    [pytest.param(False, id="sync", marks=pytest.mark.nightly), pytest.param(True, id="async")],
)


def scheduler_class(*, is_async):
    build = build_async_phase_scheduler if is_async else build_phase_scheduler
    return build(AsyncScheduler if is_async else Scheduler)


def driver_for(demo_model, *, is_async=False, blocks=BLOCKS, groups=(), **engine_args):
    config = engine_config(demo_model, is_async=is_async, blocks=blocks, **engine_args)
    chosen = scheduler_class(is_async=is_async)
    return Driver.build(chosen, config, is_async=is_async, tiered=True, groups=groups)


def prompt(tokens, seed, *, thinks):
    """A prompt that shares nothing with those of other seeds."""
    return tuple(make_prompt(random.Random(seed), tokens, thinks=thinks, shared=1000 + seed))


def turn(driver, job):
    """Serve one request to its end; how many of its prompt's tokens were found in the cache."""
    before = driver.hits
    driver.add(job)
    driver.drain()
    return driver.hits - before


def step_until(driver, request_id, phase, tokens=1):
    """Step until the request has so many tokens in a phase."""
    tracker = driver.scheduler.phase_tracker
    while (state := tracker.get(request_id)).phase is not phase or state.tokens_in_phase < tokens:
        driver.step()


def preempt(driver, request_id):
    """Preempt one running request, as a reset of the cache does."""
    scheduler = driver.scheduler
    request = scheduler.requests[request_id]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0, drop_stale_output=True)


def let_eagle_draft(driver):
    """Let vLLM drop the last block of each hit in the first cache group, as where EAGLE drafts."""
    coordinator = driver.scheduler.kv_cache_manager.coordinator
    coordinator.eagle_group_ids = {0}
    # From 0.33 on vLLM goes by these.
    coordinator.drop_eagle_group_ids = {0}
    coordinator.single_type_managers[0].use_eagle = True


def pool_of(driver):
    return driver.scheduler.kv_cache_manager.block_pool


def blocks_of(driver, request_id):
    """A running request's full blocks: id to the tokens that end with it."""
    (blocks,) = driver.scheduler.kv_cache_manager.get_blocks(request_id).blocks
    return {b.block_id: b.block_hash_num_tokens for b in blocks if b.block_hash is not None}


def tiers_of(driver):
    """Ids of the free cached blocks by tier."""
    _, *tiers = walk_tiers(pool_of(driver).free_block_queue)
    return dict(zip(Tier, map(set, tiers), strict=True))


def counted(driver, event):
    totals = driver.scheduler.phase_counters.totals
    return {name.partition(":")[2]: n for name, n in totals.items() if name.startswith(event)}


def free_order(driver):
    queue = pool_of(driver).free_block_queue
    return [(block.block_id, block.block_hash) for block in queue.get_all_free_blocks()]


def load(driver, seed, requests=25, after_step=lambda: None):
    """Requests of all kinds that want more than the pool, with aborts and resets among them."""
    rng = random.Random(seed)
    for number in range(requests):
        thinks = rng.random() < 0.7
        driver.add(
            Job(
                f"r{number}",
                tuple(
                    make_prompt(rng, rng.randrange(10, 150), thinks=thinks, shared=rng.randrange(5))
                ),
                rng.randrange(200) if thinks else None,
                rng.randrange(60),
                arrival_time=float(number),
            )
        )
        for _ in range(rng.randrange(25)):
            driver.step()
            after_step()
        if rng.random() < 0.15:
            driver.abort(f"r{rng.randrange(number + 1)}")
            after_step()
        if rng.random() < 0.05:
            driver.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
            after_step()
    while driver.scheduler.has_unfinished_requests():
        driver.step()
        after_step()
    driver.drain()


class logged:  # noqa: N801 -- used as a context manager only
    """vLLM's loggers do not propagate."""

    def __init__(self, caplog):
        self.handler = caplog.handler

    def __enter__(self):
        logging.getLogger("vllm").addHandler(self.handler)

    def __exit__(self, *_):
        logging.getLogger("vllm").removeHandler(self.handler)


# About 13 blocks, of which one is prompt.
THINKER = Job("thinker", prompt(40, 2, thinks=True), 360, 40)
