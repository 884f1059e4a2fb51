"""Ratios with bootstrap intervals over seeds and other items that are alike; bounds of shares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
_RESAMPLES = 2000
_COVERAGE = 0.95
# Bisection steps of [0, 1] down to the last bit of a double.
_HALVINGS = 60


@dataclass(frozen=True)
class Spread:
    """Median and range of one figure over seeds."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Spread of the values, or None of nothing."""
        if not values:
            return None
        return cls(median(values), min(values), max(values), len(values))


def quantile(values: Sequence[float] | NDArray[np.float64], share: float) -> float | None:
    """The ``share`` quantile (0 to 1) of the values that are no NaN; None without any."""
    known = _known(values)
    return float(np.quantile(known, share)) if known.size else None


def mean(values: Sequence[float] | NDArray[np.float64]) -> float | None:
    """The mean of the values that are no NaN; None without any."""
    known = _known(values)
    return float(known.mean()) if known.size else None


def _known(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    known: NDArray[np.float64] = array[~np.isnan(array)]
    return known


def ratio_of_sums(
    above: Sequence[float] | NDArray[np.float64],
    below: Sequence[float] | NDArray[np.float64] | None = None,
) -> tuple[float | None, Interval | None]:
    """The sum of one figure over that of another, paired by item, such as one item per seed.

    Args:
        above: an element per item.
        below: the same of the other; None: 1 each, so that the ratio is the mean of ``above``.

    Returns:
        The ratio, and its 95 % percentile interval over resampled items. Both None where the sum
        below is 0. No interval for fewer than two items. An end of it may be infinite: a
        resample counts so in which only the sum below is 0. Deterministic.
    """
    tops = np.asarray(above, np.float64)
    totals = np.ones_like(tops) if below is None else np.asarray(below, np.float64)
    total = float(totals.sum())
    if total == 0:
        return None, None
    return float(tops.sum()) / total, _interval(tops, totals)


def _interval(above: NDArray[np.float64], below: NDArray[np.float64]) -> Interval | None:
    if len(above) < 2:  # noqa: PLR2004 - one item has no spread
        return None
    picks = bootstrap_picks(len(above))
    tops, totals = above[picks].sum(axis=1), below[picks].sum(axis=1)
    known = (tops != 0) | (totals != 0)
    with np.errstate(divide="ignore"):
        return percentile_interval(tops[known] / totals[known])


def bootstrap_picks(items: int) -> NDArray[np.int64]:
    """Indices of the resampled items, [resamples, items]; the same in every call."""
    return np.random.default_rng(0).integers(0, items, (_RESAMPLES, items))


def percentile_interval(values: Sequence[float] | NDArray[np.float64]) -> Interval:
    """Low and high of a statistic over the resamples."""
    tail = (1 - _COVERAGE) / 2
    if np.isinf(values).any():
        # Between a number and infinity nothing can be interpolated.
        low = np.quantile(values, tail, method="lower")
        return float(low), float(np.quantile(values, 1 - tail, method="higher"))
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def plain_interval(
    interval: Interval | None,
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
