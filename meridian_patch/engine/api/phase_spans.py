"""Exports a request's thoughts and answers as child spans of the span that vLLM exports for it.

Nothing here waits for a collector: vLLM's span processor queues spans and drops them if the queue
is full.
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import Span

from meridian_patch import envs
from meridian_patch.phase.phase_log import PhaseSpan
from meridian_patch.phase.progress import THINK

PREFIX: Final = "meridian"
"""Prefix of attributes: ``meridian.exit_reason``, ``meridian.preemptions``, ..."""

# The exporters repeat the same failure with each batch while there is no collector.
_REPEATS_AFTER_S: Final = 600.0
_EXPORTERS: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)


def export_spans(parent: Span, phases: Iterable[PhaseSpan], summary: Mapping[str, Any]) -> None:
    """Export spans ``think`` and ``answer``.

    Args:
        parent: the request's span, which has ended already.
        phases: the request's thoughts and answers.
        summary: the request's summary, which tells what ended its last thought.
    """
    tracer = trace.get_tracer(envs.PLUGIN_NAME)
    context = trace.set_span_in_context(parent)
    phases = list(phases)
    thoughts = [phase for phase in phases if phase.place == THINK]
    for phase in phases:
        attributes = {
            f"{PREFIX}.begin_token": phase.begin_token,
            f"{PREFIX}.tokens": phase.end_token - phase.begin_token,
            f"{PREFIX}.preemptions": phase.preemptions,
        }
        if phase.place == THINK and phase.is_ended:
            attributes[f"{PREFIX}.boundary_token"] = phase.end_token - 1
            if phase is thoughts[-1] and "exit_reason" in summary:
                attributes[f"{PREFIX}.exit_reason"] = summary["exit_reason"]
        name = "think" if phase.place == THINK else "answer"
        span = tracer.start_span(
            name, context, start_time=_nanoseconds(phase.begin_s), attributes=attributes
        )
        span.end(end_time=_nanoseconds(phase.end_s))


def warn_once_of_failures() -> None:
    """Let the exporters log a failure once in ten minutes, not with each batch and retry."""
    for name in _EXPORTERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _OnceInAWhile) for each in logger.filters):
            logger.addFilter(_OnceInAWhile())


class _OnceInAWhile(logging.Filter):
    """Drops warnings and errors for ten minutes after one."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now_s = time.monotonic()
        if now_s - self._last_s < _REPEATS_AFTER_S:
            return False
        self._last_s = now_s
        return True


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
