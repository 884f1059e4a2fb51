"""Served conversations: what users say, and figures from metrics pages and notes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.conversation_figures import (
    avoidable_miss_share,
    read_pool_use,
    read_turn_counters,
    served_figures,
)
from meridian_patch.bench.served.conversation_script import (
    Exchange,
    ServedHistory,
    ServedLoad,
    build_messages,
    draw_conversations,
    most_prompt_tokens,
)
from meridian_patch.bench.served.counters import difference
from meridian_patch.bench.served.workload import TraceRequest
from meridian_patch.telemetry.prometheus import PhaseMetrics

LOAD = ServedLoad(conversations=50, rate_per_s=2.0)
END = (257,)


def page_of(hits: int, *, ours: bool) -> str:
    """A metrics page on which 1,000 prompt tokens were looked up by each of two engines."""
    registry = CollectorRegistry()
    for engine in ("0", "1"):
        for name, value in (("queries", 1000), ("hits", hits)):
            metric = f"vllm:prefix_cache_{name}"
            known = registry._names_to_collectors.get(metric)
            counter = known or Counter(metric, "", ["engine"], registry=registry)
            counter.labels(engine).inc(value)
    # Not to be taken for the one above.
    Counter("vllm:external_prefix_cache_hits", "", registry=registry).inc(99)
    Gauge("vllm:kv_cache_usage_perc", "", ["engine"], registry=registry).labels("0").set(0.25)
    if ours:
        metrics = PhaseMetrics("m", registry)
        metrics.initialize(0)
        metrics.record({"kv_eviction:think_complete": 7, "kv_hit_tokens:in_use": 64}, 0)
    return generate_latest(registry).decode()


def record_of(token_ids: list[int], token_s: list[float], answer: str = "3") -> RequestRecord:
    request = TraceRequest("1-0", 1.0, (), "3", 100)
    return RequestRecord(request, 1.0, token_ids, token_s, answer, "stop")


def test_conversations_depend_on_the_seed_alone():
    assert draw_conversations(LOAD, 1) == draw_conversations(LOAD, 1)
    assert draw_conversations(LOAD, 1) != draw_conversations(LOAD, 2)


def test_conversations_are_as_asked():
    conversations = draw_conversations(LOAD, 3)
    assert len(conversations) == LOAD.conversations
    assert all(a.arrival_s < b.arrival_s for a, b in pairwise(conversations))
    assert {len(c.turns) for c in conversations} == set(range(2, 7))
    systems = {c.system for c in conversations}
    assert len(systems) == LOAD.system_prompts
    assert all(abs(len(system) - LOAD.system_tokens) < 3 for system in systems)
    assert all(c.turns[0].pause_s == 0 for c in conversations)
    assert all(turn.pause_s > 0 for c in conversations for turn in c.turns[1:])


def test_a_higher_rate_asks_the_same_questions_sooner():
    slow, fast = (draw_conversations(replace(LOAD, rate_per_s=rate), 1) for rate in (1.0, 2.0))
    assert [c.turns for c in slow] == [c.turns for c in fast]
    assert slow[-1].arrival_s == pytest.approx(2 * fast[-1].arrival_s)


@pytest.mark.parametrize("history", ServedHistory)
def test_only_a_kept_history_says_thoughts_again(history):
    messages = build_messages("be good", [Exchange("q?", "hmm", "3\n.")], "r?", history)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert (messages[2].get("reasoning") == "hmm") == (history is ServedHistory.KEPT)
    assert messages[2]["content"] == "3\n."


def test_prompt_length_is_bounded_from_above():
    """A character is a token; templates add a role and an end to each message, and think marks."""
    messages = build_messages("be", [Exchange("q?", "hmm", "3")], "r?", ServedHistory.KEPT)
    in_prompt = len("beq?hmm3r?") + 2 * len(messages) + len(("<think>", "\n", "</think>"))
    opened = len(("<|assistant|>", "<think>", "\n"))
    assert in_prompt + opened <= most_prompt_tokens(messages) < 2 * (in_prompt + opened) + 10


def test_counters_of_two_pages():
    before = read_turn_counters(page_of(100, ours=True))
    after = read_turn_counters(page_of(700, ours=True))
    rose = difference(before, after)
    assert (rose["hit_tokens"], rose["prompt_tokens"]) == (1200.0, 0.0)
    assert (after["evictions_think_complete"], after["evictions_output_critical"]) == (7.0, 0.0)
    assert (after["hits_in_use"], after["preemptions_think"]) == (64.0, 0.0)
    assert read_pool_use(page_of(1, ours=False)) == 0.25


def test_a_stock_page_leaves_our_figures_open():
    counters = read_turn_counters(page_of(500, ours=False))
    assert set(counters) == {"hit_tokens", "prompt_tokens"}
    figures = served_figures([], END, counters, [])
    assert figures["hit_share"] == 0.5
    assert figures["evictions_think_complete"] is None
    assert figures["ttfat_p50_s"] is None


def test_figures_of_records():
    ended = record_of([5, 257, 6, 7], [1.1, 1.2, 1.5, 2.0])
    unended = record_of([5, 5], [1.3, 3.0], answer="")
    figures = served_figures([ended, unended], END, {}, [0.2, 0.4])
    assert figures["ttfat_p50_s"] == pytest.approx(0.5)
    assert figures["unended_thoughts"] == 1
    assert figures["accuracy"] == 0.5
    assert figures["tokens_per_s"] == pytest.approx(3.0)
    assert figures["pool_use_mean"] == pytest.approx(0.3)


def test_without_thinking_the_first_token_answers():
    figures = served_figures([record_of([6, 7], [1.4, 1.5])], (), {}, [])
    assert figures["ttfat_p50_s"] == pytest.approx(0.4)


def test_avoidable_misses():
    assert avoidable_miss_share(ours=0.75, stock=0.5, ample=0.8) == pytest.approx(1 / 6)
    assert avoidable_miss_share(ours=0.5, stock=0.8, ample=0.8) is None
