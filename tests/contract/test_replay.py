"""The replay bench on vLLM's real scheduler and KV manager."""

import dataclasses

import pytest

from meridian_patch.bench.simulated import conversations
from meridian_patch.bench.simulated.conversation_arms import turns_arm
from meridian_patch.bench.simulated.conversation_run import TurnsJob, TurnsSource, run_job
from meridian_patch.bench.simulated.conversations import (
    History,
    Lengths,
    TurnsLoad,
    draw_conversations,
)
from meridian_patch.bench.simulated.cost import DEFAULT_COST, load_cost
from meridian_patch.errors import BenchError
from meridian_patch.replay import scheduler as replay_scheduler
from meridian_patch.replay.accounting import RecomputedTokens
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.player import play
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_markers

TIGHT, LARGE = 2400, 200_000
CONVERSATIONS = 10


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    """Conversations of hundreds of tokens: the same shape, in a second."""
    monkeypatch.setattr(conversations, "SYSTEM_TOKENS", (60, 100))
    monkeypatch.setattr(conversations, "TURNS", (2, 5))
    monkeypatch.setattr(conversations, "LOOP_REQUESTS", (1, 3))
    for name, longest in (("USER", 60), ("THINK", 200), ("LOOP_THINK", 100), ("ANSWER", 60)):
        fitted = getattr(conversations, name)
        monkeypatch.setattr(conversations, name, Lengths(fitted.parts, longest))


def job(arm="stock", history=History.STRIPPED, pool=TIGHT, **changes):
    made = TurnsJob(history, pool, 8.0, 3, turns_arm(arm, history), CONVERSATIONS, DEFAULT_COST)
    return dataclasses.replace(made, **changes)


def play_all(arm, history=History.STRIPPED, pool=TIGHT, *, is_async=True):
    markers = read_markers()
    load = TurnsLoad(history, CONVERSATIONS, 8.0)
    conversations = draw_conversations(load, 3, markers.content_ids)
    cost = load_cost(DEFAULT_COST)
    engine = ReplayEngine(
        turns_arm(arm, history), pool // BLOCK_SIZE, cost.step_seconds, markers, is_async=is_async
    )
    records = play(engine, TurnsSource(conversations, history, markers))
    assert len(records) == sum(len(conversation.exchanges) for conversation in conversations)
    return engine, records


def without(run, *names):
    return {k: v for k, v in dataclasses.asdict(run).items() if k not in {*names, "wall_s"}}


@pytest.mark.parametrize(
    ("arm", "history", "is_async"),
    [
        *(("meridian", history, True) for history in History),
        ("stock", History.STRIPPED, True),
        ("stock", History.STRIPPED, False),
        ("tiers", History.TOOL_LOOP, False),
    ],
)
def test_every_request_finishes_and_hits_are_vllms_own(arm, history, is_async):
    """All tokens are delivered in order of time, and hit counts equal vLLM's own statistics."""
    engine, records = play_all(arm, history, is_async=is_async)
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


@pytest.mark.parametrize("history", [History.STRIPPED, History.TOOL_LOOP])
def test_noop_gives_the_figures_of_stock(history):
    """Under preemption our classes with everything off decide as stock does, to the last digit."""
    stock, noop = run_job(job("stock", history)), run_job(job("noop", history))
    assert without(stock, "counters") == without(noop, "counters")
    assert stock.preemptions > 0
    assert stock.counters == {}
    assert sum(noop.counters[name] for name in noop.counters if "preemption" in name) == (
        stock.preemptions
    )


@pytest.mark.parametrize("history", History)
def test_the_infinite_bound_is_what_a_large_pool_hits(history):
    """With nothing evicted, stock hits exactly what the infinite cache is said to hit."""
    run = run_job(job("stock", history, LARGE))
    assert run.hit_tokens == run.bound_tokens > 0
    assert run.preemptions == run.recomputed_tokens == 0


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
    stock, tiers = run_job(job("stock")), run_job(job("tiers"))
    assert stock.hit_tokens < tiers.hit_tokens <= tiers.bound_tokens
    assert tiers.counters["kv_eviction:think_complete"] > 0


def test_a_replay_is_repeatable():
    assert without(run_job(job("meridian"))) == without(run_job(job("meridian")))


def test_saturation_offers_everything_at_once():
    """Without arrivals and pauses the same work is done in less time."""
    paced, saturated = run_job(job()), run_job(job(is_saturated=True))
    assert saturated.prompt_tokens == paced.prompt_tokens
    assert saturated.makespan_s < paced.makespan_s


@pytest.mark.parametrize(
    ("history", "rule"), [(History.STRIPPED, "strip"), (History.TOOL_LOOP, "keep_in_tool_loop")]
)
def test_tiers_know_the_history_and_run_on_the_virtual_clock(history, rule):
    engine, _ = play_all("tiers", history)
    assert engine.scheduler.kv_tiers.history == rule
    assert engine.scheduler.kv_cache_manager.clock() == engine.now > 0


def test_arms_do_not_read_the_environment(monkeypatch):
    """What is set for a server in this shell changes no arm."""
    expected = without(run_job(job("tiers")))
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__TIERS", "false")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    assert without(run_job(job("tiers"))) == expected


def test_a_pool_that_cannot_hold_one_request_is_refused():
    with pytest.raises(BenchError, match=r"--pool is 160 tokens, expected at least \d+"):
        run_job(job(pool=160))


def test_a_patched_process_has_no_stock_arm(monkeypatch):
    patched = type("Patched", (), {"__module__": "meridian_patch.engine.scheduler.scheduler"})
    monkeypatch.setattr(replay_scheduler, "AsyncScheduler", patched)
    with pytest.raises(BenchError, match="already patched"):
        run_job(job())
