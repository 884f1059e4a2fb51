"""Natural thoughts with their possible stops, and how each would end under a threshold."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Stop(NamedTuple):
    """A point at which a thought could be closed.

    Attributes:
        think_tokens: number of think tokens before the close.
        is_correct: whether the answer after a forced close there is right.
        value: the strategy's value there: EAT's variance (nats squared) or RPDI.
    """

    think_tokens: int
    is_correct: bool
    value: float


class Record(NamedTuple):
    """One problem with a thought that came to its natural end.

    Attributes:
        problem: its name.
        think_tokens: length of the natural thought.
        is_correct: whether its answer is right; None without a reference answer.
        stops: points at which the strategy was evaluated, in order.
    """

    problem: str
    think_tokens: int
    is_correct: bool | None
    stops: Sequence[Stop]


class Ending(NamedTuple):
    """How a problem ends under one threshold."""

    think_tokens: int
    is_correct: bool


def ending(record: Record, threshold: float, *, fires_below: bool) -> Ending:
    """The first stop whose value is below the threshold (EAT), or above it (RPDI).

    NaN never fires. If no stop fires, the natural end is returned.
    """
    for stop in record.stops:
        fires = stop.value < threshold if fires_below else stop.value > threshold
        if fires and stop.think_tokens < record.think_tokens:
            return Ending(stop.think_tokens, stop.is_correct)
    return Ending(record.think_tokens, bool(record.is_correct))


def endings(
    records: Sequence[Record], thresholds: Sequence[float], *, fires_below: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Think tokens and correctness of all endings, both [n_thresholds, n_records]."""
    rows = [
        [ending(record, threshold, fires_below=fires_below) for record in records]
        for threshold in thresholds
    ]
    tokens = np.array([[end.think_tokens for end in row] for row in rows], np.float64)
    correct = np.array([[end.is_correct for end in row] for row in rows], np.bool_)
    return tokens, correct
