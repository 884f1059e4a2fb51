"""Signals: what the worker is asked to measure, what came back, and whether it comes at all.

Imports neither vLLM nor torch. The scheduler sets a plan on a ``SchedulerOutput``; the worker sets
signals on the ``ModelRunnerOutput`` of the same step. Load-bearing: both classes are plain
dataclasses, whose extra attributes survive pickling.
"""

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from meridian_patch.engine import status
from meridian_patch.exit.actions import NO_OBSTACLES, Obstacle, Obstacles
from meridian_patch.exit.strategies.base import NO_SIGNALS, TokenSignals
from meridian_patch.exit.strategies.build import BY_PROBES, BY_SIGNALS
from meridian_patch.telemetry.counters import PROBING_STOPPED, PhaseCounters

logger = logging.getLogger("vllm.meridian_patch")


# Probing ends after so many probes in a row without a signal. It is more than one step can lose: a
# step whose measuring failed loses its probes, at most 16 by default, and the next may succeed.
MOST_LOST = 32


class MeasuredSignals(NamedTuple):
    """What was measured in one step, in a form that is fast to send to another process.

    Attributes:
        names: request ids.
        counts: number of rows of each, in order: 1 plus its draft tokens; None: 1 each.
        values: [n_rows, 4] float32, with the rows of a request next to each other:
            ``[entropy in nats, log-sum-exp, max probability, probability of the boundary id]`` of
            softmax(raw logits); four NaN if the row of logits contains a NaN.
        refusal: why this worker measures nothing from now on; None: it measures.
    """

    names: Sequence[str]
    counts: Sequence[int] | None
    values: Any
    refusal: str | None = None

    def spans(self) -> dict[str, tuple[int, int]]:
        """The first row of each request, and the end of its rows (exclusive).

        Under speculation the scheduler uses one row per accepted token. A request in the middle of
        its prompt has a row but no token.
        """
        ends = list(accumulate(self.counts or [1] * len(self.names), initial=0))
        return dict(zip(self.names, pairwise(ends), strict=True))

    def by_request(self) -> dict[str, Any]:
        """The rows of each request: views of ``values``, [1 or more, 4]."""
        return {name: self.values[start:end] for name, (start, end) in self.spans().items()}


class MeasurePlan(NamedTuple):
    """What the worker measures in one step.

    Attributes:
        request_ids: requests to measure; those that are not in the step are ignored.
        boundary_id: first token id of the boundary that ends thinking.
    """

    request_ids: tuple[str, ...]
    boundary_id: int


Kept = tuple[Any, tuple[int, int] | None]
"""Where the row of one token is: a step's table and the request's span in it; None if missing."""


class StepSignals:
    """Finds a request's rows in a step's signals.

    Attributes:
        table: [n_rows, 4] of the step; None: nothing was measured in it.
        spans: first row and end row (exclusive) of each request in ``table``.
        refusal: why the worker never measures anything; None: it has not refused.
    """

    def __init__(self) -> None:
        self.table: Any = None
        self.spans: dict[str, tuple[int, int]] = {}
        self.refusal: str | None = None
        # The inputs of `spans`, which is reused because they are the same in nearly all steps.
        self._made_of: tuple[Any, Any] = ((), None)

    def receive(self, signals: MeasuredSignals | None) -> None:
        """Take the signals of a step's output; None: nothing was measured in it."""
        if signals is not None and signals.refusal is not None:
            self.refusal = signals.refusal
            signals = None
        if signals is None:
            self.over()
            return
        values = signals.values
        # Rows are kept for many steps. A view into other memory (Ray's, or a pinned buffer) would
        # keep that memory alive, or be overwritten, so it is copied.
        self.table = values if values.flags.owndata else values.copy()
        made_of = signals.names, signals.counts
        if made_of != self._made_of:
            self._made_of, self.spans = made_of, signals.spans()

    def over(self) -> None:
        """Drop the table of a step that was processed."""
        self.table = None

    def forget(self) -> None:
        """Drop everything, because no request is measured any more."""
        self.table, self.spans, self._made_of = None, {}, ((), None)

    def rows(self, name: str, number: int) -> list[TokenSignals]:
        """The rows of a request's next ``number`` tokens; ``NO_SIGNALS`` for unmeasured ones."""
        span = None if self.table is None else self.spans.get(name)
        rows = [] if span is None else self.table[slice(*span)][:number].tolist()
        return rows + [NO_SIGNALS] * (number - len(rows))


def rows_of(kept: Sequence[Kept]) -> list[TokenSignals]:
    """The rows of kept tokens, one each.

    Rows are converted to lists late and together, because thousands of small lists that are kept
    for long would slow down Python's garbage collector.
    """
    return [
        NO_SIGNALS if table is None or span is None else table[span[0]].tolist()
        for table, span in kept
    ]


class SignalHealth:
    """Counts lost signals, and notes a worker's refusal to measure.

    Args:
        counters: counts that probing came to an end.
        is_blind: the workers measure nothing from the start.

    Attributes:
        is_blind: the workers measure nothing.
    """

    def __init__(self, counters: PhaseCounters, *, is_blind: bool) -> None:
        self._counters = counters
        self.is_blind = is_blind
        self._num_lost = 0

    def probed(self, *, is_lost: bool) -> None:
        """Count a probe that ended without being aborted."""
        self._num_lost = self._num_lost + 1 if is_lost else 0

    def check(self, refusal: str | None, *, is_probing: bool) -> Obstacles:
        """After a step: find what can no longer be carried out; report it in log, status, metric.

        Args:
            refusal: the workers' reason for measuring nothing; None: they have given none.
            is_probing: thoughts are probed.

        Returns:
            New obstacles by strategy; if those that need probes are among them, probing
            must stop.
        """
        if refusal is not None and not self.is_blind:
            self.is_blind = True
            logger.warning("meridian_patch: early exit has no signals, only bounds: %s", refusal)
            status.publish(exit_signals=f"none: {refusal}")
            if is_probing:
                self._counters.count(PROBING_STOPPED, "refused")
                report_not_probed(refusal)
            return dict.fromkeys(BY_SIGNALS, Obstacle.NO_SIGNALS)
        if is_probing and self._num_lost >= MOST_LOST:
            self._counters.count(PROBING_STOPPED, "lost")
            report_not_probed(f"{self._num_lost} probes in a row came back without a signal")
            return dict.fromkeys(BY_PROBES, Obstacle.NO_SIGNALS)
        return NO_OBSTACLES


def report_not_probed(why: str) -> None:
    """Report in log and status that EAT is off."""
    logger.warning("meridian_patch: EAT is off, thoughts are not probed: %s", why)
    status.publish(probes=f"off: {why}")
