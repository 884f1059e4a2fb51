from prometheus_client import CollectorRegistry, Counter, generate_latest

from meridian_patch.bench.served.counters import difference, read_counters
from meridian_patch.telemetry.prometheus import PhaseMetrics


def page_of(*, ours: bool) -> str:
    registry = CollectorRegistry()
    stock = Counter("vllm:num_preemptions", "", ["engine"], registry=registry)
    stock.labels("0").inc(3)
    stock.labels("1").inc(4)
    if ours:
        metrics = PhaseMetrics("m", registry)
        metrics.initialize(0)
        metrics.record({"preemption:think": 5, "preemption:answer": 2, "fallback:slow": 1}, 0)
        metrics.record({"preemption:think": 6}, 1)
    return generate_latest(registry).decode()


def test_stock_page_has_the_total_alone():
    """A server without our metrics gives its own total, summed over engines, and no more."""
    assert read_counters(page_of(ours=False)) == {"preemptions": 7.0}


def test_our_page_has_the_phases():
    """The names read here are the names that telemetry exports."""
    assert read_counters(page_of(ours=True)) == {
        "preemptions": 7.0,
        "answer_preemptions": 2.0,
        "think_preemptions": 11.0,
        "policy_fallbacks": 1.0,
    }


def test_declared_counter_without_samples_stands_at_zero():
    """A labelled counter that nothing has counted yet is zero, not absent."""
    page = "# HELP meridian_preemptions_total x\n# TYPE meridian_preemptions_total counter\n"
    assert read_counters(page) == {"answer_preemptions": 0.0, "think_preemptions": 0.0}


def test_difference_is_what_rose():
    """Each counter's rise is given; one that was absent before rose from zero."""
    after = {"preemptions": 9.0, "answer_preemptions": 2.0}
    assert difference({"preemptions": 7.0}, after) == {
        "preemptions": 2.0,
        "answer_preemptions": 2.0,
    }
