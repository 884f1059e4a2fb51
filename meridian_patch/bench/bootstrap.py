"""Bootstrap intervals over seeds."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")
_RESAMPLES = 2000
_COVERAGE = 0.95


def bootstrap_interval(
    items: Sequence[Item], statistic: Callable[[Sequence[Item]], float | None]
) -> tuple[float, float] | None:
    """The 95 % percentile interval of a statistic over resampled items, one item per seed.

    Returns:
        Low and high; None for fewer than two items, or when the statistic is nowhere defined.
        Deterministic.
    """
    if len(items) < 2:  # noqa: PLR2004 - one item has no spread
        return None
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(items), (_RESAMPLES, len(items)))
    values = [statistic([items[index] for index in pick]) for pick in picks]
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    tail = (1 - _COVERAGE) / 2
    low, high = np.quantile(defined, [tail, 1 - tail])
    return float(low), float(high)
