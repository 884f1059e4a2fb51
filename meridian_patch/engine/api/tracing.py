"""Follows the phases of requests, and adds how thinking ended to their OpenTelemetry spans."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider

from meridian_patch.engine.api.guard import ApiGuard
from meridian_patch.engine.api.phase_spans import PREFIX, export_spans, warn_once_of_failures
from meridian_patch.engine.api.phase_times import (
    FOLLOWING,
    follow_outputs,
    lose_outputs,
    times_of,
)
from meridian_patch.exit.actions import Summary

_ENDS = ApiGuard("times of a request that ended were not observed")
_SPANS = ApiGuard("spans of a request's phases were not exported")
_ADDED: ContextVar["Added | None"] = ContextVar("added", default=None)


def span_attributes(summary: Summary, prefix: str = PREFIX) -> dict[str, Any]:
    """A summary as attributes of a span, whose values may not be dicts."""
    attributes: dict[str, Any] = {}
    for key, value in summary.items():
        name = f"{prefix}.{key}"
        attributes |= span_attributes(value, name) if isinstance(value, dict) else {name: value}
    return attributes


@dataclass(slots=True)
class Added:
    """What is added to the spans of one request, and the spans themselves."""

    attributes: Mapping[str, Any]
    spans: list[Span] = field(default_factory=list)


class _Adder(SpanProcessor):
    def on_start(self, span: Span, parent_context: Any = None) -> None:  # noqa: ARG002
        added = _ADDED.get()
        if added is not None:
            span.set_attributes(added.attributes)
            added.spans.append(span)


def add_to_spans_of(provider: Any) -> None:
    """Make ``adding`` apply to the spans of a tracer provider, with a span processor."""
    if isinstance(provider, TracerProvider):
        provider.add_span_processor(_Adder())
        warn_once_of_failures()


@contextmanager
def adding(attributes: Mapping[str, Any]) -> Iterator[Added]:
    """Context manager: spans that are started within get these attributes, and are kept."""
    added = Added(attributes)
    before = _ADDED.set(added)
    try:
        yield added
    finally:
        _ADDED.reset(before)


def build_output_processor(original: type) -> type:
    """``original`` that knows the phases of its requests; its spans say how thinking ended."""

    class TracedOutputProcessor(original):
        _is_added = False

        def process_outputs(
            self,
            engine_core_outputs: list[Any],
            engine_core_timestamp: float | None = None,
            iteration_stats: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            # Load-bearing: the states of all requests under way. Upstream forgets those that end
            # here.
            try:
                now_s = engine_core_timestamp or 0.0
                follow_outputs(
                    self.request_states,
                    engine_core_outputs,
                    now_s,
                    iteration_stats,
                    is_traced=self.tracing_enabled,
                )
            except Exception as error:
                FOLLOWING.failed(error)
                lose_outputs(self.request_states, engine_core_outputs)
            return super().process_outputs(
                engine_core_outputs, engine_core_timestamp, iteration_stats, *args, **kwargs
            )

        def _update_stats_from_finished(
            self, req_state: Any, finish_reason: Any, iteration_stats: Any, *args: Any
        ) -> None:
            super()._update_stats_from_finished(req_state, finish_reason, iteration_stats, *args)
            progress = getattr(req_state, "progress", None)
            if iteration_stats is not None and progress is not None:
                with _ENDS:
                    times_of(iteration_stats).ended(progress)

        def do_tracing(
            self, engine_core_output: Any, req_state: Any, iteration_stats: Any, *args: Any
        ) -> Any:
            # Load-bearing: the engine sets its tracer provider before its first request ends.
            if not self._is_added:
                self._is_added = True
                add_to_spans_of(trace.get_tracer_provider())
            # Load-bearing: upstream starts and ends the span within this call. Request states of
            # other classes have no summary.
            summary = getattr(req_state, "thinking", {})
            with adding(span_attributes(summary)) as added:
                result = super().do_tracing(engine_core_output, req_state, iteration_stats, *args)
            with _SPANS:
                progress = getattr(req_state, "progress", None)
                if added.spans and progress is not None and progress.log is not None:
                    phases = progress.log.end(
                        progress,
                        iteration_stats.iteration_timestamp,
                        req_state.stats.num_preemptions,
                    )
                    export_spans(added.spans[0], phases, summary)
            return result

    return TracedOutputProcessor
