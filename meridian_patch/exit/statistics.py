"""Confidence of a threshold's figures: upper bounds of shares, and bootstrap intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meridian_patch.errors import CalibrationError
from meridian_patch.exit.records import Record, endings

# Bisection steps of [0, 1] down to the last bit of a double.
_HALVINGS = 60
_RESAMPLES = 2000


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


class Bands(NamedTuple):
    """Intervals (low, high) of two figures.

    Attributes:
        saving_ratio: share of all think tokens that early exit saves.
        accuracy_loss: share of right answers without early exit minus that with it.
    """

    saving_ratio: tuple[float, float]
    accuracy_loss: tuple[float, float]


def bootstrap_bands(
    records: Sequence[Record], threshold: float, *, fires_below: bool, coverage: float = 0.95
) -> Bands:
    """Percentile intervals over resampled labelled problems; deterministic.

    They show the spread; the bound of ``calibrate`` does not depend on them.

    Args:
        records: one per problem; unlabelled ones are left out.
        threshold: the strategy's threshold.
        fires_below: as in ``calibrate``.
        coverage: share of resamples inside an interval.

    Raises:
        CalibrationError: no problem is labelled.
    """
    labelled = [record for record in records if record.is_correct is not None]
    if not labelled:
        raise CalibrationError(
            f"none of {len(records)} problems has a reference answer, expected a labelled set"
        )
    tokens, correct = endings(labelled, [threshold], fires_below=fires_below)
    natural = np.array([record.think_tokens for record in labelled], np.float64)
    loss = np.array([bool(record.is_correct) for record in labelled], np.float64) - correct[0]
    count = len(labelled)
    picks = np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
    saving = 1 - tokens[0][picks].sum(axis=1) / natural[picks].sum(axis=1)
    return Bands(_interval(saving, coverage), _interval(loss[picks].mean(axis=1), coverage))


def _interval(values: NDArray[np.float64], coverage: float) -> tuple[float, float]:
    tail = (1 - coverage) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
