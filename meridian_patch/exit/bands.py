"""How far a threshold's figures would move with another set of problems."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meridian_patch.errors import CalibrationError
from meridian_patch.exit.records import Record, endings

_RESAMPLES = 2000


class Bands(NamedTuple):
    """Low and high of two figures.

    Attributes:
        saving_ratio: share of all think tokens that are not thought.
        accuracy_loss: share of right answers without early exit less that with it.
    """

    saving_ratio: tuple[float, float]
    accuracy_loss: tuple[float, float]


def bootstrap_bands(
    records: Sequence[Record], threshold: float, *, fires_below: bool, coverage: float = 0.95
) -> Bands:
    """Percentile intervals over resampled labelled problems; deterministic.

    They show the spread. The bound of ``calibrate`` does not rest on them.

    Args:
        records: one per problem; unlabelled ones are left out.
        threshold: of the strategy.
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
