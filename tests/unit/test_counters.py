"""Counters travel as differences and become Prometheus samples."""

from prometheus_client import CollectorRegistry, generate_latest

from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import Fallback, PhaseCounters
from meridian_patch.telemetry.prometheus import PhaseMetrics


def test_drain_gives_differences_and_keeps_totals():
    """Each drain holds what happened since the last one; totals go on."""
    events = PhaseCounters()
    events.count(counters.PREEMPTION, "think")
    events.count(counters.PREEMPTION, "think")
    assert events.drain() == {"preemption:think": 2}
    events.count(counters.FALLBACK, Fallback.SLOW)
    assert events.drain() == {"fallback:slow": 1}
    assert events.drain() == {}
    assert events.totals == {"preemption:think": 2, "fallback:slow": 1}


def samples(registry):
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if not line.startswith("#") and "_created" not in line}


def test_metrics_have_the_documented_names_and_labels():
    """The exported names are the ones the README and the demo use."""
    registry = CollectorRegistry()
    metrics = PhaseMetrics("m", registry)
    labels = {
        "preemption": ["think"],
        "fallback": ["slow"],
        "phase_change": ["think"],
        "kv_eviction": ["think_complete"],
        "kv_hit_tokens": ["in_use"],
        "exit": ["eat"],
        "think_tokens": ["eat"],
        "exit_verdict": ["eat"],
        "measured": ["observe"],
        "exit_given_up": ["grammar"],
        "probe": ["measured"],
        "invalid_signals": ["think"],
        "ignored_field": ["meridian_itl_ms"],
        "step": ["ran", "learnt"],
    }
    metrics.initialize(0, labels)
    metrics.record({"exit:eat": 1, "think_tokens:eat": 90, "probe:measured": 4}, engine=0)
    metrics.record({"preemption:think": 2, "requests:answer": 5}, engine=0)
    metrics.record({"preemption:think": 1, "fallback:slow": 1, "requests:answer": 3}, engine=0)
    metrics.record({"step:ran": 64, "step:learnt": 63}, engine=0)
    metrics.record({"kv_eviction:think_complete": 7, "kv_hit_tokens:in_use": 64}, engine=0)
    assert samples(registry) == {
        'meridian_preemptions_total{engine="0",model_name="m",phase="think"} 3.0',
        'meridian_policy_fallbacks_total{engine="0",model_name="m",reason="slow"} 1.0',
        'meridian_phase_changes_total{engine="0",model_name="m",phase="think"} 0.0',
        'meridian_kv_evictions_total{engine="0",model_name="m",tier="think_complete"} 7.0',
        'meridian_kv_hit_tokens_total{engine="0",model_name="m",tier="in_use"} 64.0',
        'meridian_ignored_fields_total{engine="0",field="meridian_itl_ms",model_name="m"} 0.0',
        'meridian_requests{engine="0",model_name="m",phase="answer"} 3.0',
        'meridian_thoughts_ended_total{engine="0",model_name="m",reason="eat"} 1.0',
        'meridian_think_tokens_total{engine="0",model_name="m",reason="eat"} 90.0',
        'meridian_exit_verdicts_total{engine="0",model_name="m",reason="eat"} 0.0',
        'meridian_thoughts_measured_total{engine="0",mode="observe",model_name="m"} 0.0',
        'meridian_exits_given_up_total{engine="0",model_name="m",reason="grammar"} 0.0',
        'meridian_probes_total{engine="0",model_name="m",result="measured"} 4.0',
        'meridian_invalid_signals_total{engine="0",model_name="m",phase="think"} 0.0',
        'meridian_steps_total{engine="0",kind="ran",model_name="m"} 64.0',
        'meridian_steps_total{engine="0",kind="learnt",model_name="m"} 63.0',
    }


def test_a_second_engine_in_one_process_starts_over():
    """vLLM makes a logger per engine; the later one's metrics replace the earlier one's."""
    registry = CollectorRegistry()
    PhaseMetrics("m", registry).record({"preemption:think": 2}, engine=0)
    PhaseMetrics("m", registry).record({"preemption:think": 1}, engine=0)
    assert samples(registry) == {
        'meridian_preemptions_total{engine="0",model_name="m",phase="think"} 1.0'
    }
