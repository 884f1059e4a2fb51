"""Figures of one run: what clients noted, and counters of metrics pages."""

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.metrics import (
    EMULATED_KINDS,
    FIGURE_KINDS,
    TURN_KINDS,
    difference,
    first_answer_index,
    longest_silence,
    read_counters,
    request_times,
    run_figures,
)
from meridian_patch.bench.served.workload import ServedRequest
from meridian_patch.bench.statistics import quantile
from meridian_patch.telemetry.prometheus import PhaseMetrics

END = (257,)


def record(token_ids, token_s, *, submit_s=1.0, answer="6", finish="stop", error=None):
    request = ServedRequest("a", submit_s, ({"role": "user", "content": "q?"},), "6", 64)
    return RequestRecord(request, submit_s, token_ids, token_s, answer, finish, error)


def one_request():
    # Two think tokens, the boundary, then three answer tokens with one stall.
    return record([10, 11, 257, 54, 10, 259], [1.5, 1.6, 1.7, 1.75, 2.75, 2.8])


@pytest.mark.parametrize(
    ("ids", "end", "first"),
    [
        ([1, 2, 9, 3], (9,), 3),
        ([9], (9,), 1),
        ([1, 2], (9,), None),
        ([], (9,), None),
        ([1, 7, 7, 8, 2], (7, 8), 4),
        ([7, 1, 8], (7, 8), None),
        ([9, 1, 9, 2], (9,), 1),
    ],
)
def test_answer_begins_after_the_first_end_marker(ids, end, first):
    """The first whole end marker decides, however many tokens it has."""
    assert first_answer_index(ids, end) == first


def test_times_of_one_request():
    """Each wait is measured between the events its name says."""
    times = request_times(one_request(), END)
    assert times.ttft_s == pytest.approx(0.5)
    assert times.boundary_s == pytest.approx(1.7)
    assert times.ttfat_s == pytest.approx(0.75)
    assert times.ttot_s == pytest.approx(0.05)
    assert times.e2e_s == pytest.approx(1.8)
    assert times.answer_gaps_s == pytest.approx((1.0, 0.05))
    assert times.answer_gap_ends_s == (2.75, 2.8)


def test_gaps_between_think_tokens_are_no_answer_gaps():
    """A pause while thinking and the wait at the boundary count in no answer gap."""
    times = request_times(record([10, 11, 257, 54, 10], [1.5, 9.0, 9.1, 15.0, 15.1]), END)
    assert times.answer_gaps_s == pytest.approx((0.1,))


def test_thought_that_never_ended_has_no_answer():
    """Without a boundary there is a first token and an end, and nothing else."""
    times = request_times(record([10, 11], [1.5, 1.6], finish="length"), END)
    assert times.ttft_s == pytest.approx(0.5)
    assert (times.boundary_s, times.ttfat_s, times.ttot_s) == (None, None, None)
    assert times.answer_gaps_s == ()


@pytest.mark.parametrize(
    "broken", [record([], [], finish=None), record([1], [1.1], error="HTTP 500")]
)
def test_failed_request_has_no_times(broken):
    """A request that failed or got nothing is left out of all times."""
    assert request_times(broken, END) is None


def test_figures_of_a_run():
    """Stalls, accuracy, throughput and failures are counted over all requests."""
    wrong = record([10, 257, 55, 259], [2.0, 2.1, 2.2, 2.3], answer="7")
    broken = record([], [], finish=None, error="ServerDisconnectedError")
    counters = {"preemptions": 5.0, "answer_preemptions": 2.0}
    figures = run_figures([one_request(), wrong, broken], END, counters)
    assert figures["answer_stalls"] == 1
    assert figures["answer_gap_max_s"] == pytest.approx(1.0)
    assert figures["accuracy"] == pytest.approx(0.5)
    assert figures["failed_requests"] == 1
    assert figures["tokens_per_s"] == pytest.approx(10 / 1.8)
    assert figures["preemptions"] == 5
    assert figures["answer_preemptions"] == 2
    assert figures["think_preemptions"] is None


def test_every_figure_has_a_kind():
    """What is computed and what is shown are the same names."""
    kinds = {kind.name for kind in (*FIGURE_KINDS, *TURN_KINDS, *EMULATED_KINDS)}
    assert set(run_figures([], END, {})) == kinds


def test_figures_of_nothing():
    """A run that broke off before the first token has figures, all unknown or zero."""
    figures = run_figures([], END, {})
    assert {value for value in figures.values() if value is not None} <= {0.0}
    assert figures["ttft_p50_s"] is None


def test_quantile():
    """Quantiles interpolate; of nothing there is none."""
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert quantile([], 0.5) is None


def test_silence_needs_a_stream_under_way():
    """The pause between two requests is no silence; one in the middle of a stream is."""
    early, late = record([1, 2, 3], [1.0, 1.1, 1.4]), record([1, 2], [9.0, 9.1])
    assert longest_silence([early, late]) == pytest.approx(0.3)


def test_stream_served_meanwhile_breaks_a_silence():
    """While any stream gets tokens there is no silence, however long another one waits."""
    stalled, served = record([1, 2], [1.0, 2.0]), record([1, 2, 3], [1.2, 1.5, 1.9])
    assert longest_silence([stalled, served]) == pytest.approx(0.4)
    assert longest_silence([]) is None


def test_thoughts_without_an_end_are_counted():
    """Without a marker there is no thinking: the first token answers."""
    unended = record([10, 11], [1.5, 1.6], finish="length")
    assert run_figures([one_request(), unended], END, {})["unended_thoughts"] == 1
    figures = run_figures([unended], (), {})
    assert (figures["unended_thoughts"], figures["ttfat_p50_s"]) == (0, pytest.approx(0.5))


def page_of(hits: int, *, ours: bool) -> str:
    """A page of two engines, each of which looked up 1,000 prompt tokens."""
    registry = CollectorRegistry()
    values = {"num_preemptions": 3, "prefix_cache_queries": 1000, "prefix_cache_hits": hits}
    for name, value in values.items():
        counter = Counter(f"vllm:{name}", "", ["engine"], registry=registry)
        for engine in ("0", "1"):
            counter.labels(engine).inc(value)
    # Not to be taken for the one above.
    Counter("vllm:external_prefix_cache_hits", "", registry=registry).inc(99)
    if ours:
        metrics = PhaseMetrics("m", registry)
        metrics.initialize(0)
        metrics.record({"preemption:think": 5, "preemption:answer": 2, "fallback:exception": 1}, 0)
        metrics.record({"preemption:think": 6, "fallback:slow": 1}, 1)
        metrics.record({"kv_eviction:think_complete": 7, "kv_hit_tokens:in_use": 64}, 0)
        metrics.record({"probe:measured": 4}, 0)
    return generate_latest(registry).decode()


def test_stock_page_has_its_own_counters_alone():
    """A server without our metrics gives vLLM's totals over engines; what is ours is unknown."""
    counters = read_counters(page_of(500, ours=False))
    assert counters == {"preemptions": 6.0, "prompt_tokens": 2000.0, "hit_tokens": 1000.0}
    figures = run_figures([], END, counters)
    assert (figures["hit_share"], figures["evictions_think_complete"]) == (0.5, None)


def test_our_page_has_phases_and_tiers():
    """The names read here are the names that telemetry exports."""
    found = read_counters(page_of(500, ours=True))
    ours = {name: value for name, value in found.items() if value and name != "hit_tokens"}
    assert ours == {
        "preemptions": 6.0,
        "prompt_tokens": 2000.0,
        "answer_preemptions": 2.0,
        "think_preemptions": 11.0,
        "policy_fallbacks": 2.0,
        "policy_exceptions": 1.0,
        "probes_measured": 4.0,
        "evictions_think_complete": 7.0,
        "hits_in_use": 64.0,
    }
    assert {"probes_lost", "evictions_output_critical", "hits_think_active"} <= found.keys()


def test_declared_counter_without_samples_stands_at_zero():
    """A labelled counter that has not counted yet is zero, not absent."""
    page = "# HELP meridian_preemptions_total x\n# TYPE meridian_preemptions_total counter\n"
    assert read_counters(page) == {"answer_preemptions": 0.0, "think_preemptions": 0.0}


def test_difference_is_what_rose():
    """Each counter's rise is given; one that was absent before rose from zero."""
    after = {"preemptions": 9.0, "answer_preemptions": 2.0}
    assert difference({"preemptions": 7.0}, after) == {
        "preemptions": 2.0,
        "answer_preemptions": 2.0,
    }
