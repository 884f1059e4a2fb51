"""Many random steps of the real scheduler and KV manager: nothing leaks, nothing is miscounted."""

import itertools
import random

import pytest
from queue_watch import link_faults, watch_evictions
from scheduler_driver import (
    BLOCK_SIZE,
    WORD,
    Driver,
    Job,
    engine_config,
    full_attention,
    make_prompt,
    sliding_window,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.policy.retention import Tier

pytestmark = pytest.mark.slow

# Twelve drivers: more than 100 000 steps together.
STEPS_PER_DRIVER = 9000
CHECK_EVERY = 25
MAX_PROMPT = 330
# Cache groups and blocks: room for the largest request, but not for three.
GROUPS = {
    "full": ((full_attention(BLOCK_SIZE),), 40),
    "hybrid": ((full_attention(BLOCK_SIZE), sliding_window(48, BLOCK_SIZE // 2)), 64),
}


class Traffic:
    """Random requests: new ones, several with one prompt, and next turns of earlier ones."""

    def __init__(self, driver, seed):
        self.driver = driver
        self.rng = random.Random(seed)
        self.numbers = itertools.count()
        self.now = 0.0
        driver.scheduler.kv_cache_manager.clock = lambda: self.now

    def arrive(self):
        prompt, thinks = self.prompt()
        # As a request with n > 1 comes in: the same prompt several times at once.
        for _ in range(self.rng.choice([1, 1, 1, 1, 2, 3])):
            number = next(self.numbers)
            job = Job(
                f"r{number}",
                prompt,
                self.rng.randrange(250) if thinks else None,
                self.rng.randrange(80),
                priority=self.rng.randrange(2),
                arrival_time=float(number),
                max_tokens=self.rng.choice([60, 1500, 1500]),
            )
            self.driver.add(job)

    def prompt(self):
        rng, jobs = self.rng, list(self.driver.jobs.values())[-40:]
        if jobs and rng.random() < 0.5:
            before = rng.choice(jobs)
            said = ()
            if rng.random() < 0.4:
                # A client that sends the thought back.
                said = tuple(before.token(i) for i in range(rng.randrange(120)))
            text = (*before.prompt, *said, *[WORD] * rng.randrange(30))
            if len(text) < MAX_PROMPT:
                thinks = rng.random() < 0.6
                return (*text, 256 if thinks else WORD), thinks
        thinks = rng.random() < 0.7
        size = rng.randrange(4, 160)
        return tuple(make_prompt(rng, size, thinks=thinks, shared=rng.randrange(6))), thinks

    def act(self, *, resets_running):
        """What happens between two steps."""
        rng, scheduler = self.rng, self.driver.scheduler
        # Blocks live about a minute here, so some decay and most do not.
        self.now += rng.choice([0.05, 0.05, 0.05, 3.0])
        if len(scheduler.requests) < 14 and rng.random() < 0.08:
            self.arrive()
        if scheduler.requests and rng.random() < 0.012:
            self.driver.abort(rng.choice(list(scheduler.requests)))
        if rng.random() < 0.002:
            scheduler.reset_prefix_cache(reset_running_requests=False)
        if resets_running and rng.random() < 0.002:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        # Now and then everybody leaves.
        if rng.random() < 0.001:
            self.driver.drain()


@pytest.mark.parametrize(
    "queue_policy", ["fcfs", pytest.param("priority", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    "mode", [pytest.param("sync", marks=pytest.mark.nightly), "async", "deferred"]
)
def test_nothing_leaks_and_nothing_is_miscounted(
    monkeypatch, demo_model, mode, groups, queue_policy
):
    """Arrivals, aborts, preemptions, resets and decay, in any order, for thousands of steps."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US", "10000000")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__RETAIN_S", "60")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__CHECK_INTERVAL_S", "0.001")
    is_async = mode != "sync"
    specs, blocks = GROUPS[groups]
    config = engine_config(
        demo_model, is_async=is_async, blocks=blocks, scheduling_policy=queue_policy
    )
    build = build_async_phase_scheduler if is_async else build_phase_scheduler
    chosen = build(AsyncScheduler if is_async else Scheduler)
    driver = Driver.build(chosen, config, is_async=is_async, tiered=True, groups=specs)
    scheduler = driver.scheduler
    # As with a KV connector that loads into blocks: they come back a step later.
    scheduler.defer_block_free = mode == "deferred"
    pool = scheduler.kv_cache_manager.block_pool
    queue = pool.free_block_queue
    evictions = watch_evictions(pool)
    traffic = Traffic(driver, seed=f"{mode} {groups} {queue_policy}")

    tokens = 0
    while driver.steps < STEPS_PER_DRIVER:
        traffic.act(resets_running=mode != "deferred")
        tokens += driver.step().total_num_scheduled_tokens
        if driver.steps % CHECK_EVERY == 0:
            assert find_faults(pool) == []
    driver.drain()
    # Deferred blocks come back with the next step that does something.
    driver.add(Job("last", (WORD,) * 5, None, 2))
    driver.drain()

    assert find_faults(pool) == []
    assert not list(link_faults(queue))
    assert queue.num_free_blocks == blocks - 1
    assert not scheduler.requests
    assert not scheduler.deferred_frees
    assert len(scheduler.phase_tracker) == scheduler.phase_tracker.num_reasoning == 0
    assert set(scheduler.phase_tracker.counts.values()) == {0}
    assert queue.assigned == {}
    assert queue.retention is None
    assert scheduler.kv_tiers._finished == {}
    assert len(queue._entries) <= blocks

    totals = scheduler.phase_counters.totals
    hits = sum(n for name, n in totals.items() if name.startswith("kv_hit_tokens:"))
    assert hits == driver.hits + driver.preempted_hits
    evicted = {tier: totals.get(f"kv_eviction:{tier.label}", 0) for tier in Tier}
    assert sum(evicted.values()) == evictions()
    assert not [name for name in totals if name.startswith("fallback")]

    # The traffic must be worth the name.
    assert min(evicted.values()) > 0
    assert driver.preempted_hits > 0
    assert driver.hits > 1000
    assert totals["preemption:think"] > 20
    assert tokens > 3 * STEPS_PER_DRIVER
