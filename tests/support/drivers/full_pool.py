"""A full KV pool in which time-sharing may preempt long thinkers, on vLLM's real scheduler."""

import random

from scheduler_driver import BLOCK_SIZE, Job, make_prompt
from tier_driver import driver_for, step_until

from meridian_patch.phase.tracker import Phase

BLOCKS = 40
BUDGET = 512


def share_time_alone(monkeypatch):
    """Time-sharing may preempt any thought of 200 tokens, and nothing else decides."""
    for name, value in {
        "time_budget_us": "10000000",
        "step_cut": "false",
        "level_tokens": "200",
        "prompt_weight": "0",
    }.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name.upper()}", value)


def job(name, seed, *, prompt=60, think=50, answer=20, **more):
    """A thinker whose prompt shares nothing with those of other seeds."""
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer, **more)


def taught_driver(demo_model, **options):
    """A driver whose step-time model knows what tokens cost; no request is left."""
    options = {"blocks": BLOCKS, "max_num_batched_tokens": BUDGET, **options}
    driver = driver_for(demo_model, **options)
    for number in range(12):
        driver.add(job(f"lesson{number}", number, prompt=50 + 40 * number, think=20, answer=5))
        driver.drain()
    return driver


def filled_driver(demo_model, *, prompt=60, frees_late=False, names=("other", "long"), **options):
    """Two long thinkers hold most of the pool; the step-time model knows what tokens cost."""
    driver = taught_driver(demo_model, **options)
    driver.scheduler.defer_block_free = frees_late
    # Of two that are equal the last admitted makes room.
    jobs = {
        "long": job("long", 50, prompt=prompt, think=700, answer=5),
        "other": job("other", 51, think=500, answer=5),
    }
    for name in names:
        driver.add(jobs[name])
    step_until(driver, "long", Phase.THINK, 290)
    return driver


def newcomer(blocks, name="new", seed=52):
    """A request whose prompt takes so many blocks."""
    return job(name, seed, prompt=BLOCK_SIZE * blocks, think=2, answer=3)


def num_preempted_for_room(driver):
    """How often a thinker was preempted so far."""
    return driver.scheduler.phase_counters.totals.get("preemption:think", 0)
