"""Thoughts and answers as child spans of the request's span, as a collector receives them."""

import logging
import time
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from scheduler_driver import Job
from served_driver import JOBS, THINKS, Served, patch_output_processor
from trace_collector import TraceCollector

from meridian_patch.engine.api import phase_spans

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@pytest.fixture(autouse=True)
def patched(monkeypatch, demo_model):
    patch_output_processor(monkeypatch, demo_model)


@pytest.fixture
def collector():
    with TraceCollector() as listening:
        yield listening


@pytest.fixture
def exporting(monkeypatch):
    """Makes a provider vLLM's, which exports to an endpoint without delay."""
    built = []

    def export_to(endpoint, **options):
        provider = TracerProvider(**options)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=0.2)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=50))
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
        built.append(provider)
        return provider

    yield export_to
    for provider in built:
        provider.shutdown()


def serve(demo_model, *jobs, **options):
    """The requests served to their end, one after the other."""
    served = Served(demo_model, is_traced=True, **options)
    for job in jobs:
        served.add(job)
        served.driver.drain()
    return served


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_each_thought_and_answer_is_a_child_of_the_request(
    demo_model, collector, exporting, is_async
):
    """With the places of their tokens; a request that does not think has an answer alone."""
    exporting(collector.endpoint)
    serve(demo_model, *JOBS.values(), is_async=is_async)
    requests = collector.wait_for("llm_request", 4)
    thoughts, answers = collector.wait_for("think", 3), collector.wait_for("answer", 3)
    names = dict(zip((span["id"] for span in requests), JOBS, strict=True))
    thought = {names[span["parent"]]: span for span in thoughts}
    assert set(thought) == {"thinks", "cut", "own"}
    assert thought["thinks"]["meridian.begin_token"] == 0
    assert thought["thinks"]["meridian.boundary_token"] == 12
    assert thought["thinks"]["meridian.tokens"] == 13
    assert thought["cut"]["meridian.tokens"] == 20
    assert "meridian.boundary_token" not in thought["cut"]
    assert thought["own"]["meridian.begin_token"] == 1
    assert thought["own"]["meridian.boundary_token"] == 6
    answer = {names[span["parent"]]: span for span in answers}
    assert set(answer) == {"thinks", "plain", "own"}
    for name, begin in (("thinks", 13), ("plain", 0), ("own", 7)):
        assert answer[name]["meridian.begin_token"] == begin
    whole = {names[span["id"]]: span["gen_ai.usage.completion_tokens"] for span in requests}
    assert answer["thinks"]["meridian.tokens"] == whole["thinks"] - 13
    assert answer["plain"]["meridian.tokens"] == whole["plain"]
    for request in requests:
        for child in (*thoughts, *answers):
            if child["parent"] == request["id"]:
                assert child["begin_s"] <= child["end_s"] <= request["end_s"] + 1e-3


def test_preemptions_are_those_within_the_phase(demo_model, collector, exporting):
    """Of all phases together as many as the requests had."""
    exporting(collector.endpoint)
    served = Served(demo_model, is_traced=True, blocks=12)
    for number in range(4):
        served.add(Job(f"r{number}", THINKS, 150, 10))
    served.driver.drain()
    spans = [*collector.wait_for("think", 4), *collector.wait_for("answer", 4)]
    told = [served.outputs(f"r{number}")[-1].meridian["preemptions"] for number in range(4)]
    assert sum(span["meridian.preemptions"] for span in spans) == sum(told) > 0


def test_nothing_is_kept_or_exported_without_tracing(demo_model, collector, exporting):
    """Also where the request's own span is not sampled."""
    exporting(collector.endpoint)
    served = Served(demo_model)
    served.add(JOBS["thinks"])
    for _ in range(4):
        served.driver.step()
    assert served.processor.request_states["thinks"].progress.log is None
    served.driver.drain()
    exporting(collector.endpoint, sampler=ALWAYS_OFF)
    serve(demo_model, JOBS["cut"])
    time.sleep(0.2)
    assert collector.wait_for("think", 0) == collector.wait_for("llm_request", 0) == []


def test_a_failure_of_ours_leaves_vllms_span(demo_model, collector, exporting, monkeypatch):
    """The request ends, and its own span is exported."""
    monkeypatch.setattr("meridian_patch.engine.api.tracing.export_spans", None)
    exporting(collector.endpoint)
    served = serve(demo_model, JOBS["thinks"])
    assert served.outputs("thinks")[-1].finish_reason == "stop"
    assert len(collector.wait_for("llm_request", 1)) == 1


def test_without_a_collector_no_step_waits_and_one_warning_is_logged(
    demo_model, exporting, monkeypatch, caplog
):
    """However many batches fail."""
    logger = logging.getLogger(EXPORTER)
    monkeypatch.setattr(logger, "filters", [])
    provider = exporting("http://127.0.0.1:9/v1/traces")
    served = Served(demo_model, is_traced=True)
    take, slowest_s = served.take, 0.0

    def timed(sent):
        nonlocal slowest_s
        start = time.perf_counter()
        take(sent)
        slowest_s = max(slowest_s, time.perf_counter() - start)

    served.take = timed
    with caplog.at_level(logging.WARNING, EXPORTER):
        for number in range(6):
            served.add(replace(JOBS["thinks"], request_id=f"r{number}"))
            served.driver.drain()
            time.sleep(0.15)
        provider.shutdown()
    # An attempt takes longer than this.
    assert slowest_s < 0.2
    failures = [each for each in caplog.records if each.name == EXPORTER]
    assert len(failures) == 1
    assert phase_spans._REPEATS_AFTER_S > 60
