"""Bootstrap intervals over seeds, problems and other items that are alike."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
_RESAMPLES = 2000
_COVERAGE = 0.95


def bootstrap_interval(
    items: Sequence[Item], statistic: Callable[[Sequence[Item]], float | None]
) -> tuple[float, float] | None:
    """The 95 % percentile interval of a statistic over resampled items, such as one per seed.

    Returns:
        Low and high; None for fewer than two items, or when the statistic is nowhere defined.
        Deterministic.
    """
    if len(items) < 2:  # noqa: PLR2004 - one item has no spread
        return None
    values = [statistic([items[index] for index in pick]) for pick in _picks(len(items))]
    return _interval([value for value in values if value is not None])


def bootstrap_quotient(
    above: NDArray[np.float64], below: NDArray[np.float64]
) -> tuple[float, float] | None:
    """The same for the sum of ``above`` over that of ``below``, one element of both per item.

    Undefined where the sum of ``below`` is 0. Many times faster than ``bootstrap_interval``.
    """
    if len(above) < 2:  # noqa: PLR2004 - one item has no spread
        return None
    picks = _picks(len(above))
    totals = below[picks].sum(axis=1)
    return _interval((above[picks].sum(axis=1)[totals != 0] / totals[totals != 0]).tolist())


def _picks(items: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, items, (_RESAMPLES, items))


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    tail = (1 - _COVERAGE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
