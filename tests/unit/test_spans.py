"""Summaries as attributes of spans."""

import pytest

pytest.importorskip("vllm")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meridian_patch.engine.api.tracing import add_to_spans_of, adding, span_attributes


def test_a_summary_is_flat_in_a_span():
    summary = {
        "exit_reason": "natural",
        "think_tokens": 30,
        "would_exit": {"exit_reason": "eat", "think_tokens": 12},
    }
    assert span_attributes(summary) == {
        "meridian.exit_reason": "natural",
        "meridian.think_tokens": 30,
        "meridian.would_exit.exit_reason": "eat",
        "meridian.would_exit.think_tokens": 12,
    }
    assert span_attributes({}) == {}


def test_only_spans_started_within_have_them():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    add_to_spans_of(provider)
    tracer = provider.get_tracer("test")
    tracer.start_span("before", attributes={"own": 1}).end()
    with adding({"meridian.exit_reason": "eat"}):
        tracer.start_span("within", attributes={"own": 1}).end()
    tracer.start_span("after", attributes={"own": 1}).end()
    got = {span.name: dict(span.attributes) for span in exporter.get_finished_spans()}
    assert got["within"] == {"own": 1, "meridian.exit_reason": "eat"}
    assert got["before"] == got["after"] == {"own": 1}


def test_nothing_is_added_where_nothing_is_exported():
    add_to_spans_of(object())
