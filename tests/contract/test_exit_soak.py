"""Thousands of requests that leave at every possible moment: early exit keeps nothing of them."""

import random
from collections import Counter

import pytest
from leaks import find_leaks
from scheduler_driver import Driver, Job, engine_config, make_prompt
from tier_driver import ASYNC_AND_NIGHTLY_SYNC
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.phase.tracker import Phase

pytestmark = pytest.mark.slow

REQUESTS = 5000
# Less than what the requests of a full batch grow to.
BLOCKS = 34
CHECK_EVERY = 500
SETTINGS = {
    "EXIT__MODE": "enforce",
    "EXIT__MIN_THINK_TOKENS": "16",
    "EXIT__GRACE_TOKENS": "4",
    "EXIT__EAT_WARMUP_PROBES": "2",
    "EXIT__EAT_MAX_ENTROPY_NATS": "null",
    "EXIT__PROBE_MIN_GAP_TOKENS": "4",
    "EXIT__PROBE_MAX_GAP_TOKENS": "8",
    "EXIT__PROBE_EVERY_STEPS": "1",
    "POLICY__TIME_BUDGET_US": "10000000",
}
# What some requests ask for by themselves.
WISHES = [
    None,
    None,
    None,
    {"meridian_exit": "observe"},
    {"meridian_exit": "off"},
    {"meridian_max_think_tokens": 24},
    {"meridian_eat_delta": 1e-12, "meridian_rpdi_lambda": 1.5},
]


class LateDriver(Driver):
    """Aborts also reach the scheduler while a step is on its way, as in the engine's own loop."""

    before_delivery = staticmethod(lambda: None)

    def _deliver(self):
        self.before_delivery()
        super()._deliver()


class Traffic:
    """Random requests, and aborts of those that are at a given moment of their lives."""

    def __init__(self, driver, seed):
        self.driver = driver
        self.rng = random.Random(seed)
        self.num_requests = 0
        self.aborts = Counter()
        driver.before_delivery = self.abort_some
        scheduler = driver.scheduler
        exits, tracker = scheduler.early_exit, scheduler.phase_tracker

        def in_phase(phase):
            return [name for name in scheduler.requests if is_in(name, phase)]

        def is_in(name, phase):
            state = tracker.get(name)
            return state is not None and state.phase is phase

        def watched(is_such):
            return [name for name, each in exits.requests.items() if is_such(each)]

        self.moments = {
            "before the first token": lambda: in_phase(Phase.PREFILL),
            "in thought": lambda: in_phase(Phase.THINK),
            "in the answer": lambda: in_phase(Phase.ANSWER),
            "probe in flight": lambda: [each.watched.name for each in exits.probes.live.values()],
            "probe due": lambda: list(exits.probes.due),
            "being closed": lambda: watched(lambda each: each.closing),
            "a token was forced": lambda: watched(lambda each: each.has_close_begun),
        }

    def arrive(self):
        rng, number = self.rng, self.num_requests
        self.num_requests += 1
        thinks = rng.random() < 0.85
        prompt = make_prompt(rng, rng.randrange(4, 70), thinks=thinks, shared=rng.randrange(5))
        job = Job(
            f"r{number}",
            tuple(prompt),
            rng.randrange(120) if thinks else None,
            rng.randrange(12),
            # Some are cut off, in thought or behind it.
            max_tokens=rng.choice([30, 1500, 1500, 1500]),
        )
        self.driver.add(job, rng.choice(WISHES))

    def abort_some(self):
        rng = self.rng
        if rng.random() < 0.15:
            there = {moment: names for moment, find in self.moments.items() if (names := find())}
            if there:
                # Now the rarest moment, now any.
                rarest = min(there, key=self.aborts.__getitem__)
                moment = rng.choice([rarest, *there])
                names = there[moment]
                # Clients leave alone or with their connection.
                names = rng.sample(names, min(rng.choice([1, 1, 2]), len(names)))
                self.driver.abort(names)
                self.aborts[moment] += len(names)
        if rng.random() < 0.001:
            self.driver.abort(None)
            self.aborts["everybody"] += 1

    def act(self):
        """What happens between two steps."""
        rng = self.rng
        # Some thoughts converge, others do not.
        self.driver.entropy_nats = rng.choice([0.5, 0.5, 0.5, 3.0])
        while len(self.driver.scheduler.requests) < 24 and rng.random() < 0.6:
            self.arrive()
        self.abort_some()


@ASYNC_AND_NIGHTLY_SYNC
def test_aborts_at_any_moment_leave_nothing(monkeypatch, demo_model, is_async):
    """No probe, slot, watch, close, outcome, phase or block, after 5 000 requests."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_{name}", value)
    config = engine_config(demo_model, is_async=is_async, blocks=BLOCKS)
    build = build_async_phase_scheduler if is_async else build_phase_scheduler
    chosen = build(AsyncScheduler if is_async else Scheduler)
    driver = LateDriver.build(chosen, config, is_async=is_async, tiered=True)
    scheduler, pool = driver.scheduler, driver.scheduler.kv_cache_manager.block_pool
    traffic = Traffic(driver, seed=f"soak {is_async}")
    while traffic.num_requests < REQUESTS:
        traffic.act()
        driver.step()
        if driver.steps % CHECK_EVERY == 0:
            assert find_faults(pool) == []
            # What is followed is there; what was said of a step went with it.
            assert len(scheduler.early_exit.requests) <= len(scheduler.requests)
            assert not scheduler.early_exit.reports.outcomes
    driver.drain()
    # What ended with an abort is told with the next step.
    driver.add(Job("last", (65,) * 5, None, 2))
    driver.drain()

    names = {"last", *(f"r{number}" for number in range(traffic.num_requests))}
    assert left_behind(scheduler, names) == {}
    assert find_faults(pool) == []
    assert pool.num_gpu_blocks - 1 == pool.get_num_free_blocks()
    totals = scheduler.phase_counters.totals
    assert not [name for name in totals if name.startswith("fallback")]

    # The traffic must be worth the name.
    assert min(traffic.aborts[moment] for moment in traffic.moments) > 5
    assert traffic.aborts["everybody"] > 3
    assert totals["preemption:think"] > 20
    assert totals["probe:measured"] > 1000
    assert min(totals[f"exit:{reason}"] for reason in ("eat", "hard_cap", "natural")) > 50


def left_behind(scheduler, names):
    """What is not empty of all that is kept by request; ``names`` are those of all requests."""
    kept = {
        "requests": scheduler.requests,
        "running": scheduler.running,
        "waiting": list(scheduler.waiting),
        "deferred": list(scheduler.deferred_waiting),
        "counts": [number for number in scheduler.phase_tracker.counts.values() if number],
        "not idle": not scheduler.early_exit.is_idle,
        "names in our tables": find_leaks(scheduler, names),
    }
    return {name: each for name, each in kept.items() if each}
