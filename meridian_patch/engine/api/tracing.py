"""Follows the phases of requests, and adds how thinking ended to their OpenTelemetry spans."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider

from meridian_patch.engine.api.guard import ApiGuard
from meridian_patch.engine.api.phase_times import (
    FOLLOWING,
    follow_outputs,
    lose_outputs,
    times_of,
)
from meridian_patch.exit.summary import Summary

PREFIX = "meridian"
"""Prefix of names: ``meridian.exit_reason``, ``meridian.would_exit.think_tokens``, ..."""

_ADDED: ContextVar[Mapping[str, Any] | None] = ContextVar("added", default=None)


def span_attributes(summary: Summary, prefix: str = PREFIX) -> dict[str, Any]:
    """A summary as attributes of a span, whose values may not be dicts."""
    attributes: dict[str, Any] = {}
    for key, value in summary.items():
        name = f"{prefix}.{key}"
        attributes |= span_attributes(value, name) if isinstance(value, dict) else {name: value}
    return attributes


class _Adder(SpanProcessor):
    def on_start(self, span: Span, parent_context: Any = None) -> None:  # noqa: ARG002
        span.set_attributes(_ADDED.get() or {})


def add_to_spans_of(provider: Any) -> None:
    """Make ``adding`` apply to the spans of a tracer provider, with a span processor."""
    if isinstance(provider, TracerProvider):
        provider.add_span_processor(_Adder())


@contextmanager
def adding(attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: spans that are started within get these attributes."""
    before = _ADDED.set(attributes)
    try:
        yield
    finally:
        _ADDED.reset(before)


def build_output_processor(original: type) -> type:
    """``original`` that knows the phases of its requests; its spans say how thinking ended."""

    class TracedOutputProcessor(original):
        _is_added = False
        _ends = ApiGuard("times of a request that ended were not observed")

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
                follow_outputs(self.request_states, engine_core_outputs, now_s, iteration_stats)
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
                with self._ends:
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
            with adding(span_attributes(getattr(req_state, "thinking", {}))):
                return super().do_tracing(engine_core_output, req_state, iteration_stats, *args)

    return TracedOutputProcessor
