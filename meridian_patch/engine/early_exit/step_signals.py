"""Holds the signals of the step that is being processed, and reads rows kept from earlier steps."""

from collections.abc import Sequence
from typing import Any

from meridian_patch.engine.early_exit.signals import MeasuredSignals
from meridian_patch.exit.strategies.base import NO_SIGNALS, TokenSignals

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
