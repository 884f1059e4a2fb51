"""Conversations replayed on vLLM's real scheduler and KV manager."""

import dataclasses

import pytest

from meridian_patch.bench.simulated import lengths, workloads
from meridian_patch.bench.simulated.arms import arm_settings, named_arm, own_arm
from meridian_patch.bench.simulated.lengths import Lengths
from meridian_patch.bench.simulated.run import Offer, ReplayJob, run_job
from meridian_patch.bench.simulated.source import TraceSource
from meridian_patch.errors import BenchError
from meridian_patch.replay import scheduler as replay_scheduler
from meridian_patch.replay.accounting import RecomputedTokens
from meridian_patch.replay.cost import DEFAULT_COST, load_cost
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.player import play
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_template_tokens

TIGHT, LARGE = 2400, 200_000
REQUESTS = 36
TURNS = [name for name in workloads.WORKLOADS if name.startswith("s-turns")]
# Stock's order of requests, and blocks are freed in tiers.
TIERS = "tiers:policy.order=false,policy.step_cut=false,policy.time_sharing=false"


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    """Conversations of hundreds of tokens: the same shape, in a second."""
    monkeypatch.setattr(workloads, "TURNS_SYSTEM_TOKENS", (60, 100))
    monkeypatch.setattr(workloads, "TURNS", (2, 5))
    monkeypatch.setattr(workloads, "LOOP_REQUESTS", (1, 3))
    cut = {"TURN_USER": 60, "TURN_THINK": 200, "LOOP_THINK": 100, "TURN_ANSWER": 60}
    for name, longest in cut.items():
        monkeypatch.setattr(lengths, name, Lengths(getattr(lengths, name).parts, longest))


def arm_of(text):
    return own_arm(text) if ":" in text else named_arm(text)


def job(arm="stock", workload="s-turns", pool=TIGHT, **changes):
    made = ReplayJob(Offer(workload, REQUESTS), 3, arm_of(arm), 30.0, pool, DEFAULT_COST)
    return dataclasses.replace(made, **changes)


def play_all(arm, workload="s-turns", *, is_async=True):
    asked, template = job(arm, workload), read_template_tokens()
    history = asked.offer.thinking
    made = dataclasses.replace(asked.arm, settings=arm_settings(asked.arm, history))
    cost = load_cost(DEFAULT_COST)
    engine = ReplayEngine(made, TIGHT // BLOCK_SIZE, cost.step_seconds, template, is_async=is_async)
    records = play(engine, TraceSource(asked.trace(), template, history, asked.seed))
    assert len(records) == REQUESTS
    return engine, records


@pytest.mark.parametrize(
    ("arm", "workload", "is_async"),
    [
        *(("latency", workload, True) for workload in TURNS),
        ("stock", "s-turns", True),
        ("stock", "s-turns", False),
        (TIERS, "s-turns-loop", False),
    ],
)
def test_every_request_finishes_and_hits_are_vllms_own(arm, workload, is_async):
    """All tokens are delivered in order of time, and hit counts equal vLLM's own statistics."""
    engine, records = play_all(arm, workload, is_async=is_async)
    for record in records:
        assert record.finish_reason == "stop"
        assert len(record.token_s) == len(record.request.output)
        assert record.arrival_s <= record.admitted_s < record.token_s[0]
        assert record.token_s == sorted(record.token_s)
        assert record.hit_tokens <= record.bound_tokens < len(record.request.prompt)
    assert sum(record.hit_tokens for record in records) == engine.totals.engine_hits > 0
    queries = sum(len(record.request.prompt) for record in records)
    assert queries == engine.totals.engine_queries
    assert engine.is_idle
    assert (engine.totals.recomputed_tokens > 0) <= (engine.totals.preemptions > 0)
    assert "fallback:exception" not in engine.counters()


@pytest.mark.parametrize("workload", ["s-turns", "s-turns-loop"])
def test_noop_gives_the_figures_of_stock(workload):
    """Under preemption our classes with everything off decide as stock does, to the last digit."""
    stock, noop = run_job(job("stock", workload)), run_job(job("noop", workload))
    assert stock.figures == noop.figures
    assert stock.figures["preemptions"] > 0
    assert stock.counters == {}
    assert (
        sum(noop.counters[name] for name in noop.counters if "preemption" in name)
        == (stock.figures["preemptions"])
    )


@pytest.mark.parametrize("workload", TURNS)
def test_the_bound_of_hits_is_what_a_large_pool_hits(workload):
    """If nothing is evicted, stock hits exactly what is said to be the bound."""
    figures = run_job(job("stock", workload, LARGE)).figures
    assert figures["hit_share"] == figures["hit_bound_share"] > 0
    assert figures["missed_tokens"] == figures["preemptions"] == figures["recomputed_tokens"] == 0


def test_recomputed_tokens_are_those_lost_and_not_hit_again():
    """Cut short in prefill or later, hit in part on the resume, preempted in the middle of it."""
    recomputed = RecomputedTokens()
    recomputed.ran("a", 0, 100, is_prefill_chunk=True)
    recomputed.preempted("a", 300)
    recomputed.ran("a", 32, 300, is_prefill_chunk=False)
    assert recomputed.total == 100 - 32
    recomputed.preempted("a", 351)
    recomputed.ran("a", 64, 200, is_prefill_chunk=True)
    recomputed.preempted("a", 351)
    recomputed.ran("a", 160, 351, is_prefill_chunk=False)
    assert recomputed.total == (100 - 32) + (200 - 64) + (350 - 160)
    recomputed.ran("a", 351, 352, is_prefill_chunk=False)
    assert recomputed.total == 394


def test_tiers_hit_more_where_thoughts_are_stripped():
    """Under pressure the tiers avoid misses of stock, in stock's own order."""
    stock, tiers = run_job(job("stock")), run_job(job(TIERS))
    assert stock.figures["hit_share"] < tiers.figures["hit_share"]
    assert 0 <= tiers.figures["missed_tokens"] < stock.figures["missed_tokens"]
    assert tiers.counters["kv_eviction:think_complete"] > 0


def test_a_replay_is_repeatable():
    first, second = run_job(job("latency")), run_job(job("latency"))
    assert (first.figures, first.counters) == (second.figures, second.counters)


def test_saturation_offers_everything_at_once():
    """Without arrivals and pauses the same work is done in less time."""
    paced, saturated = run_job(job()).figures, run_job(job(is_saturated=True)).figures
    assert saturated["prompt_tokens"] == paced["prompt_tokens"]
    assert saturated["makespan_s"] < paced["makespan_s"]


@pytest.mark.parametrize(
    ("workload", "rule"), [("s-turns", "strip"), ("s-turns-loop", "keep_in_tool_loop")]
)
def test_tiers_know_the_history_and_run_on_the_virtual_clock(workload, rule):
    engine, _ = play_all(TIERS, workload)
    assert engine.scheduler.kv_tiers.history == rule
    assert engine.scheduler.kv_cache_manager.clock() == engine.now > 0


def test_arms_do_not_read_the_environment(monkeypatch):
    """What is set for a server in this shell changes no arm."""
    expected = run_job(job(TIERS)).figures
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__TIERS", "false")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    assert run_job(job(TIERS)).figures == expected


def test_a_patched_process_has_no_stock_arm(monkeypatch):
    patched = type("Patched", (), {"__module__": "meridian_patch.engine.scheduler.scheduler"})
    monkeypatch.setattr(replay_scheduler, "AsyncScheduler", patched)
    with pytest.raises(BenchError, match="already patched"):
        run_job(job())
