"""Counters travel as differences and become Prometheus samples."""

import re
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import Fallback, PhaseCounters
from meridian_patch.telemetry.docs import render_metrics
from meridian_patch.telemetry.metric import Kind
from meridian_patch.telemetry.metrics import METRICS
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
    """The exported names are the ones the demo and operators' dashboards use."""
    registry = CollectorRegistry()
    metrics = PhaseMetrics("m", registry)
    metrics.record({"exit:eat": 1, "think_tokens:eat": 90, "probe:measured": 4}, engine=0)
    metrics.record({"preemption:think": 2, "requests:answer": 5}, engine=0)
    metrics.record({"preemption:think": 1, "fallback:slow": 1, "requests:answer": 3}, engine=0)
    metrics.record({"step:ran": 64, "step:learnt": 63, "phase_change:think": 8}, engine=0)
    metrics.record({"kv_eviction:think_complete": 7, "kv_hit_tokens:in_use": 64}, engine=0)
    metrics.record({"exit_verdict:eat": 1, "measured:observe": 1, "probe:invalid": 1}, engine=0)
    metrics.record({"exit_given_up:grammar": 1, "invalid_signals:think": 2}, engine=0)
    metrics.record({"ignored_field:meridian_itl_ms": 1}, engine=0)
    assert samples(registry) == {
        'meridian_preemptions_total{engine="0",model_name="m",phase="think"} 3.0',
        'meridian_policy_fallbacks_total{engine="0",model_name="m",reason="slow"} 1.0',
        'meridian_phase_changes_total{engine="0",model_name="m",phase="think"} 8.0',
        'meridian_kv_evictions_total{engine="0",model_name="m",tier="think_complete"} 7.0',
        'meridian_kv_hit_tokens_total{engine="0",model_name="m",tier="in_use"} 64.0',
        'meridian_ignored_fields_total{engine="0",field="meridian_itl_ms",model_name="m"} 1.0',
        'meridian_requests{engine="0",model_name="m",phase="answer"} 3.0',
        'meridian_thoughts_ended_total{engine="0",model_name="m",reason="eat"} 1.0',
        'meridian_think_tokens_total{engine="0",model_name="m",reason="eat"} 90.0',
        'meridian_exit_verdicts_total{engine="0",model_name="m",reason="eat"} 1.0',
        'meridian_thoughts_measured_total{engine="0",mode="observe",model_name="m"} 1.0',
        'meridian_exits_given_up_total{engine="0",model_name="m",reason="grammar"} 1.0',
        'meridian_probes_total{engine="0",model_name="m",result="measured"} 4.0',
        'meridian_probes_total{engine="0",model_name="m",result="invalid"} 1.0',
        'meridian_invalid_signals_total{engine="0",model_name="m",phase="think"} 2.0',
        'meridian_steps_total{engine="0",kind="ran",model_name="m"} 64.0',
        'meridian_steps_total{engine="0",kind="learnt",model_name="m"} 63.0',
    }


def test_a_value_seen_several_times_is_observed_as_often():
    """At the cost of one: sum, count and buckets are those of single observations."""
    values = {0.03: 5, 0.1: 2, 0.7: 1, 1e9: 3}
    at_once, one_by_one = CollectorRegistry(), CollectorRegistry()
    PhaseMetrics("m", at_once).observe({"gap:answer": values, "gap:think": {0.02: 1}}, engine=1)
    metrics = PhaseMetrics("m", one_by_one)
    child = metrics._histograms["gap"].labels("m", "1", "answer")
    for value, times in values.items():
        for _ in range(times):
            child.observe(value)
    metrics.observe({"gap:think": {0.02: 1}}, engine=1)

    def read(registry):
        return {
            (sample.name, *sorted(sample.labels.items())): pytest.approx(sample.value)
            for metric in registry.collect()
            for sample in metric.samples
            if not sample.name.endswith("_created")
        }

    assert read(at_once) == read(one_by_one)
    above = (
        'meridian_inter_token_seconds_bucket{engine="1",le="0.25",model_name="m",phase="answer"}'
    )
    assert f"{above} 7.0" in samples(at_once)


PROCESS = """
from meridian_patch.telemetry.prometheus import PhaseMetrics
metrics = PhaseMetrics("m")
for engine in (0, 1):
    metrics.initialize(engine)
    metrics.observe({"gap:answer": {0.03: 5, 0.7: 2}}, engine)
    metrics.record({"tokens:answer": 7, "policy_seconds:limits": 0.25}, engine)
"""
PAGE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_api_servers_add_up(monkeypatch, tmp_path):
    """As vLLM serves them: each process has files of its own, and the page is their sum."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for _ in range(2):
        subprocess.run([sys.executable, "-P", "-c", PROCESS], check=True)
    seen = subprocess.run(
        [sys.executable, "-P", "-c", PAGE], check=True, stdout=subprocess.PIPE, text=True
    )
    page = set(seen.stdout.splitlines())
    for engine in ("0", "1"):
        labels = f'engine="{engine}",model_name="m",phase="answer"'
        assert f"meridian_inter_token_seconds_count{{{labels}}} 14.0" in page
        assert f"meridian_inter_token_seconds_sum{{{labels}}} {2 * (0.03 * 5 + 0.7 * 2)}" in page
        assert f"meridian_output_tokens_total{{{labels}}} 14.0" in page
        limits = f'engine="{engine}",model_name="m",stage="limits"'
        assert f"meridian_policy_seconds_total{{{limits}}} 0.5" in page


def test_histograms_have_the_documented_bounds():
    """Gaps above 100, 250 and 1000 ms are read from buckets; no other kind has buckets."""
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
    (gaps,) = (metric for metric in METRICS if metric.event == counters.GAP)
    assert {0.1, 0.25, 1.0} <= set(gaps.buckets)


def test_every_event_is_a_row_of_the_table():
    """Each name of counters.py is declared once, and no row has a name that is not there."""
    constants = {value for name, value in vars(counters).items() if name.isupper()}
    # Labels are among the constants; those of parts are words with spaces.
    names = {each for each in constants if re.fullmatch(r"[a-z_]+", str(each))}
    events = [metric.event for metric in METRICS]
    assert sorted(events) == sorted(names - {counters.IN_USE})
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_metrics_stand_at_zero_from_the_start():
    """Each value of each label is exported before anything happened, and no other."""
    registry = CollectorRegistry()
    PhaseMetrics("m", registry).initialize(0)
    assert all(line.endswith(" 0.0") for line in samples(registry))
    for metric in METRICS:
        found = [line for line in samples(registry) if line.startswith(f"{metric.sample_name}{{")]
        assert len(found) == len(metric.values)
        for value in metric.values:
            assert [line for line in found if f'{metric.label}="{value}"' in line]


def test_gauges_of_several_api_servers_stand_at_zero_too(tmp_path):
    """They share files, of which Prometheus reads gauges only where they were set."""
    code = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "from meridian_patch.telemetry.prometheus import PhaseMetrics\n"
        "PhaseMetrics('m').initialize(0)\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())"
    )
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for phase in ("prefill", "think", "answer"):
        line = f'meridian_requests{{engine="0",model_name="m",phase="{phase}"}} 0.0'
        assert line in ran.stdout


def test_names_follow_prometheus():
    """Names are ours, in lower case and without the suffix that Prometheus adds."""
    for metric in METRICS:
        assert re.fullmatch(r"meridian_[a-z]+(_[a-z]+)*", metric.name)
        assert not metric.name.endswith("_total")
        assert metric.help.endswith(".")
        assert "`" not in metric.help
        assert metric.unit
        assert metric.operator


def test_page_has_a_row_per_metric():
    """docs/metrics.md names each metric, its label's values and what to do."""
    page = render_metrics()
    for metric in METRICS:
        (row,) = (line for line in page.splitlines() if f"| `{metric.exported_name}` |" in line)
        assert metric.operator in row
        assert all(f"`{value}`" in row for value in metric.values)


def test_a_second_engine_in_one_process_starts_over():
    """vLLM makes a logger per engine; the later one's metrics replace the earlier one's."""
    registry = CollectorRegistry()
    PhaseMetrics("m", registry).record({"preemption:think": 2}, engine=0)
    PhaseMetrics("m", registry).record({"preemption:think": 1}, engine=0)
    assert samples(registry) == {
        'meridian_preemptions_total{engine="0",model_name="m",phase="think"} 1.0'
    }
