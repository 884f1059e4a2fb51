"""The signals of the step that is being taken in, and those kept for later."""

from collections.abc import Sequence
from typing import Any

from meridian_patch.engine.early_exit.signals import Signals
from meridian_patch.exit.strategies.base import NO_SIGNALS, Row

Kept = tuple[Any, tuple[int, int] | None]
"""Where the row of one token is: a step's table, and the request's span of it, if it has one."""


class StepSignals:
    """Finds a request's rows in what came back from a step.

    Attributes:
        table: [n_rows, 4] of the step; None: nothing was measured in it.
        spans: first and last row, the last excluded, of each request in ``table``.
        refusal: why the worker never measures anything; None: it does, as far as is known.
    """

    def __init__(self) -> None:
        self.table: Any = None
        self.spans: dict[str, tuple[int, int]] = {}
        self.refusal: str | None = None
        # What they were made of: names are the same in nearly all steps.
        self._made_of: tuple[Any, Any] = ((), None)

    def arrived(self, signals: Signals | None) -> None:
        """A step's output is back; None: nothing was measured in it."""
        if signals is not None and signals.refusal is not None:
            self.refusal = signals.refusal
            signals = None
        if signals is None:
            self.over()
            return
        values = signals.values
        # Rows are kept for many steps. What is a view into another's memory, as Ray's and that of
        # a pinned buffer, would be kept with them, or be written over.
        self.table = values if values.flags.owndata else values.copy()
        made_of = signals.names, signals.counts
        if made_of != self._made_of:
            self._made_of, self.spans = made_of, signals.spans()

    def over(self) -> None:
        """The step was taken in."""
        self.table = None

    def forget(self) -> None:
        """Nobody is measured any more."""
        self.table, self.spans, self._made_of = None, {}, ((), None)

    def rows(self, name: str, number: int) -> list[Row]:
        """The rows of a request's next tokens; what was not measured has no signals."""
        span = None if self.table is None else self.spans.get(name)
        rows = [] if span is None else self.table[slice(*span)][:number].tolist()
        return rows + [NO_SIGNALS] * (number - len(rows))


def rows_of(kept: Sequence[Kept]) -> list[Row]:
    """The rows of tokens, one each.

    They are made when they are wanted, many at a time: a list for every token, kept by the
    thousand, would keep Python's garbage collector busy.
    """
    return [
        NO_SIGNALS if table is None or span is None else table[span[0]].tolist()
        for table, span in kept
    ]
