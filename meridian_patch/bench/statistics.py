"""Bootstrap intervals over seeds, problems and other items that are alike; bounds of shares."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
_RESAMPLES = 2000
_COVERAGE = 0.95
# Bisection steps of [0, 1] down to the last bit of a double.
_HALVINGS = 60


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
    values = [statistic([items[index] for index in pick]) for pick in bootstrap_picks(len(items))]
    known = [value for value in values if value is not None]
    return percentile_interval(known) if known else None


def bootstrap_quotient(
    above: NDArray[np.float64], below: NDArray[np.float64]
) -> tuple[float, float] | None:
    """The same for the sum of ``above`` over that of ``below``, one element of both per item.

    Infinite where only the sum of ``below`` is 0, undefined where both are. An end may be infinite.
    Many times faster than ``bootstrap_interval``.
    """
    if len(above) < 2:  # noqa: PLR2004 - one item has no spread
        return None
    picks = bootstrap_picks(len(above))
    tops, totals = above[picks].sum(axis=1), below[picks].sum(axis=1)
    known = (tops != 0) | (totals != 0)
    if not (totals != 0).any():
        return None
    with np.errstate(divide="ignore"):
        return percentile_interval(tops[known] / totals[known])


def bootstrap_picks(items: int) -> NDArray[np.int64]:
    """Indices of the resampled items, [resamples, items]; the same in every call."""
    return np.random.default_rng(0).integers(0, items, (_RESAMPLES, items))


def percentile_interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Low and high of a statistic over the resamples."""
    tail = (1 - _COVERAGE) / 2
    if np.isinf(values).any():
        # Between a number and infinity nothing can be interpolated.
        low = np.quantile(values, tail, method="lower")
        return float(low), float(np.quantile(values, 1 - tail, method="higher"))
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def plain_interval(
    interval: tuple[float, float] | None,
) -> tuple[float | None, float | None] | None:
    """An interval for JSON, which has no infinity: such an end is None."""
    if interval is None:
        return None
    low, high = (None if math.isinf(end) else end for end in interval)
    return low, high


def clopper_pearson(hits: int, trials: int, risk: float) -> float:
    """Least upper bound that holds with confidence 1 - ``risk`` (Clopper and Pearson, 1934).

    The p at which a binomial count of at most ``hits`` has probability ``risk``. Exact, so never
    above ``hoeffding``.

    Returns:
        A share, from 0 to 1.
    """
    if hits >= trials:
        return 1.0
    counts = np.arange(hits + 1, dtype=np.float64)
    steps = np.log((trials - counts[:-1]) / (counts[:-1] + 1))
    log_choices = np.concatenate(([0.0], np.cumsum(steps)))
    low, high = hits / trials, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        if share in {low, high}:
            break
        terms = log_choices + counts * math.log(share) + (trials - counts) * math.log1p(-share)
        is_likelier = float(np.logaddexp.reduce(terms)) > math.log(risk)
        low, high = (share, high) if is_likelier else (low, share)
    return high


def hoeffding(hits: int, trials: int, risk: float) -> float:
    """The simpler bound of the code of arXiv:2602.03814 (its "UCB"): mean + sqrt(ln(1/risk)/2n).

    Returns:
        A share; may be above 1.
    """
    return hits / trials + math.sqrt(math.log(1 / risk) / (2 * trials))


def conformal_risk(hits: int, trials: int) -> float:
    """What conformal risk control compares with the tolerance, (hits + 1) / (trials + 1).

    It bounds the loss on the average over calibration sets, with no confidence (Angelopoulos et
    al., arXiv:2208.02814; "CRC" in the code of arXiv:2602.03814).
    """
    return (hits + 1) / (trials + 1)


def trials_needed(tolerance: float, risk: float) -> int:
    """Fewest trials with which zero hits bound the share by ``tolerance``."""
    return math.ceil(math.log(risk) / math.log1p(-tolerance))
