"""The scheduler's driver with early exit on, and thoughts that it soon takes for converged."""

import random

import numpy as np
from scheduler_driver import Driver, Job, engine_config, make_prompt
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker import worker_base

from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.patching.candidate import MARK

# Probes come early, and a steady entropy is taken for convergence soon.
EAGER = {
    "EXIT__MODE": "enforce",
    "EXIT__MIN_THINK_TOKENS": "20",
    "EXIT__GRACE_TOKENS": "4",
    "EXIT__EAT_WARMUP_PROBES": "2",
    "EXIT__EAT_MAX_ENTROPY_NATS": "null",
    "EXIT__PROBE_MIN_GAP_TOKENS": "8",
    "EXIT__PROBE_MAX_GAP_TOKENS": "16",
    "EXIT__PROBE_EVERY_STEPS": "1",
    "POLICY__TIME_BUDGET_US": "10000000",
}

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def exit_driver(
    monkeypatch,
    demo_model,
    *,
    is_async=False,
    blocks=200,
    tiered=False,
    is_tapped=True,
    groups=(),
    engine_args=None,
    **settings,
):
    """A driver whose engine has ``EAGER`` and further settings."""
    for name, value in {**EAGER, **settings}.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_{name}", value)
    config = engine_config(demo_model, is_async=is_async, blocks=blocks, **(engine_args or {}))
    # The driver stands in for workers that measure.
    if is_tapped:
        monkeypatch.setattr(worker_base.WorkerBase, MARK, "worker", raising=False)
    else:
        monkeypatch.delattr(worker_base.WorkerBase, MARK, raising=False)
    builder = build_async_phase_scheduler if is_async else build_phase_scheduler
    stock = AsyncScheduler if is_async else Scheduler
    return Driver.build(builder(stock), config, is_async=is_async, tiered=tiered, groups=groups)


def told(driver):
    """What callers are told of each request's thinking from now on, by its id, in order."""
    reports = driver.scheduler.early_exit.reports
    seen, drain = {}, reports.drain

    def drained():
        news = drain()
        for name, each in news.items():
            seen.setdefault(name, []).append(each)
        return news

    reports.drain = drained
    return seen


def thinker(name, think_tokens=400, prompt_tokens=40, **kwargs):
    prompt = make_prompt(random.Random(name), prompt_tokens, thinks=True, shared=len(name))
    return Job(name, tuple(prompt), think_tokens, 30, **kwargs)


def is_empty(driver):
    scheduler = driver.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return (
        not scheduler.requests
        and not scheduler.early_exit.requests
        and not len(scheduler.early_exit.probes or ())
        and not len(scheduler.early_exit.forced_closes)
        and not scheduler.phase_counters.totals.get("fallback:exception")
        and pool.num_gpu_blocks - 1 == pool.get_num_free_blocks()
    )


def add_drafts(monkeypatch):
    """Let engines of the driver have a drafter."""
    build = engine_config.__wrapped__
    monkeypatch.setitem(
        globals(), "engine_config", lambda *a, **k: build(*a, **k, speculative_config=DRAFTS)
    )


def only_token(row):
    """The token that a mask leaves; None: it leaves several."""
    ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return ids[0] if len(ids) == 1 else None


def force_first_rows(driver):
    """Let the pretended model sample what the first row of each request leaves, with drafts too."""
    scheduler = driver.scheduler

    def force(output, result):
        grammar = scheduler.get_grammar_bitmask(output)
        row = 0
        for name in grammar.structured_output_request_ids if grammar else ():
            token = only_token(grammar.grammar_bitmask[row])
            row += scheduler.early_exit.forced_closes.rows_of(
                name, output.scheduled_spec_decode_tokens
            )
            if token is not None:
                result.sampled_token_ids[result.req_id_to_index[name]] = [token]
                driver.forced.append((name, token))
        return result

    driver._force = force
