"""Predicts how many more tokens a request makes, from finished ones (Past-Future, ASPLOS 2025)."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

# Bin borders of the histogram, in tokens; about 8 bins per doubling.
_BORDERS: Final = np.unique(np.geomspace(16, 262_144, 113).astype(np.int64))
_FORGETTING: Final = 0.999
_MIN_COUNT: Final = 20
_REFRESH_EVERY: Final = 16


class LengthHistogram:
    """Histogram of the lengths of one phase, in which recent ones have the greatest weight."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_BORDERS) + 1)
        self._sums = np.zeros(len(_BORDERS) + 1)
        self._seen = 0
        # Mean residual life by bin: expected tokens beyond the bin's lower border.
        self._residual: NDArray[np.float64] | None = None

    def add(self, tokens: int) -> None:
        """Add a phase that ended after ``tokens`` tokens."""
        self._counts *= _FORGETTING
        self._sums *= _FORGETTING
        place = np.searchsorted(_BORDERS, tokens, side="right")
        self._counts[place] += 1
        self._sums[place] += tokens
        self._seen += 1
        if (
            self._seen >= _MIN_COUNT and self._seen % _REFRESH_EVERY == 0
        ) or self._seen == _MIN_COUNT:
            self._refresh()

    def remaining(self, attained: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Expected number of further tokens of phases that have ``attained`` tokens already.

        Returns:
            The same shape; None before enough phases have ended.
        """
        if self._residual is None:
            return None
        return self._residual[np.searchsorted(_BORDERS, attained, side="right")]

    def _refresh(self) -> None:
        lower = np.concatenate(([0], _BORDERS))
        beyond = np.cumsum(self._counts[::-1])[::-1]
        sums = np.cumsum(self._sums[::-1])[::-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            residual = sums / beyond - lower
        # Beyond the longest length seen, assume half of the attained length.
        unknown = beyond < 1
        residual[unknown] = lower[unknown] / 2
        self._residual = np.maximum(residual, 1.0)
