"""Chooses a strategy's threshold from labelled problems, with a bound of the accuracy loss."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meridian_patch.bench.statistics import (
    bootstrap_picks,
    clopper_pearson,
    conformal_risk,
    hoeffding,
    percentile_interval,
    trials_needed,
)
from meridian_patch.calibrate.records import Record, endings
from meridian_patch.errors import CalibrationError


class Point(NamedTuple):
    """One threshold on the labelled set.

    Attributes:
        threshold: as configured.
        saving_ratio: share of all think tokens that early exit saves.
        accuracy: share of right answers.
        lost, won: number of problems answered right only without, only with early exit.
        lost_bound: upper bound of the share lost, with confidence 1 - ``risk``.
        hoeffding_bound: the same by Hoeffding's inequality, for comparison.
        conformal_risk: the share lost as conformal risk control estimates it.
        is_safe: whether the bound is proven for this threshold, see ``calibrate``.
    """

    threshold: float
    saving_ratio: float
    accuracy: float
    lost: int
    won: int
    lost_bound: float
    hoeffding_bound: float
    conformal_risk: float
    is_safe: bool


class Calibration(NamedTuple):
    """The chosen threshold, and the points that it was chosen from.

    Attributes:
        chosen: the safe point with the largest saving; None if no threshold is safe.
        curve: all points, in the order in which they were tested, the most careful first.
        natural_accuracy: share of right answers without early exit.
        num_problems: number of labelled problems.
        num_unlabelled: number of problems without a reference answer, which were left out.
    """

    chosen: Point | None
    curve: tuple[Point, ...]
    natural_accuracy: float
    num_problems: int
    num_unlabelled: int


def calibrate(
    records: Sequence[Record],
    thresholds: Sequence[float],
    *,
    fires_below: bool,
    tolerance: float,
    risk: float,
) -> Calibration:
    """The threshold with the largest saving whose accuracy loss is bounded.

    A problem is lost if its natural answer is right and its early one is not (the loss of
    arXiv:2602.03814 for a stop that is too early). Accuracy falls by the share lost minus the share
    won, so by at most the share lost.

    Thresholds are tested in order, the most careful first, each by the exact binomial bound of its
    share lost. The first one that fails ends the test, and those before it are safe. The order does
    not depend on the data, so testing many thresholds needs no correction, and the share lost need
    not rise with the threshold (fixed sequence testing; Angelopoulos et al., "Learn then test",
    arXiv:2110.01052). So with confidence 1 - ``risk`` over labelled sets, every safe threshold
    loses at most ``tolerance`` of all problems like these.

    Args:
        records: one per problem, drawn independently.
        thresholds: thresholds of one strategy, not derived from these records.
        fires_below: True if a value below the threshold fires (EAT), False if one above it does
            (RPDI).
        tolerance: epsilon, share of problems that may be lost, between 0 and 1.
        risk: eta, probability that the bound does not hold, between 0 and 1.

    Raises:
        CalibrationError: the records do not suffice for such a bound; the message says why.
    """
    labelled = _labelled(records, thresholds, tolerance, risk)
    ordered = sorted(set(thresholds), reverse=not fires_below)
    natural = np.array([bool(record.is_correct) for record in labelled])
    tokens, correct = endings(labelled, ordered, fires_below=fires_below)
    total = sum(record.think_tokens for record in labelled)
    curve: list[Point] = []
    is_safe = True
    for row, threshold in enumerate(ordered):
        lost = int(np.sum(natural & ~correct[row]))
        bound = clopper_pearson(lost, len(labelled), risk)
        is_safe = is_safe and bound <= tolerance
        curve.append(
            Point(
                threshold,
                1 - float(tokens[row].sum()) / total,
                float(correct[row].mean()),
                lost,
                int(np.sum(~natural & correct[row])),
                bound,
                hoeffding(lost, len(labelled), risk),
                conformal_risk(lost, len(labelled)),
                is_safe,
            )
        )
    safe = [point for point in curve if point.is_safe]
    chosen = max(safe, key=lambda point: point.saving_ratio, default=None)
    unlabelled = len(records) - len(labelled)
    return Calibration(chosen, tuple(curve), float(natural.mean()), len(labelled), unlabelled)


def _labelled(
    records: Sequence[Record], thresholds: Sequence[float], tolerance: float, risk: float
) -> list[Record]:
    for name, share in (("tolerance", tolerance), ("risk", risk)):
        if not 0 < share < 1:
            raise CalibrationError(f"{name} is {share}, expected a share between 0 and 1")
    if not thresholds:
        raise CalibrationError("there are no thresholds to choose from, expected at least one")
    labelled = [record for record in records if record.is_correct is not None]
    if not labelled:
        raise CalibrationError(
            f"none of {len(records)} problems has a reference answer, so that nothing says what "
            "early exit costs; expected a labelled set"
        )
    if not all(record.think_tokens > 0 for record in labelled):
        raise CalibrationError("a problem has no think tokens, expected thoughts in every record")
    needed = trials_needed(tolerance, risk)
    if len(labelled) < needed:
        raise CalibrationError(
            f"{len(labelled)} labelled problems are too few: to bound the loss by {tolerance:.2%} "
            f"with confidence {1 - risk:.2%} takes at least {needed}, none of them lost. Label "
            "more problems, or allow a greater loss or risk"
        )
    right = sum(bool(record.is_correct) for record in labelled)
    if right <= tolerance * len(labelled):
        raise CalibrationError(
            f"only {right} of {len(labelled)} natural answers are right, no more than the loss "
            f"allowed ({tolerance:.2%}): stopping at once would pass. Take problems that the "
            "model can solve, check that its answers are read correctly, or allow a smaller loss"
        )
    return labelled


class Bands(NamedTuple):
    """Intervals (low, high) of two figures.

    Attributes:
        saving_ratio: share of all think tokens that early exit saves.
        accuracy_loss: share of right answers without early exit minus that with it.
    """

    saving_ratio: tuple[float, float]
    accuracy_loss: tuple[float, float]


def bootstrap_bands(records: Sequence[Record], threshold: float, *, fires_below: bool) -> Bands:
    """Percentile intervals over resampled labelled problems; deterministic.

    They show the spread; the bound of ``calibrate`` does not depend on them.

    Args:
        records: one per problem; unlabelled ones are left out.
        threshold: the strategy's threshold.
        fires_below: as in ``calibrate``.

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
    picks = bootstrap_picks(len(labelled))
    saving = 1 - tokens[0][picks].sum(axis=1) / natural[picks].sum(axis=1)
    return Bands(percentile_interval(saving), percentile_interval(loss[picks].mean(axis=1)))
