"""What the kernels compute, in NumPy and float64, row by row from the definitions."""

import math

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]


def row_signals(row: Row, boundary_id: int) -> tuple[float, float, float, float]:
    """Entropy in nats, log-sum-exp, max probability, probability of the boundary token."""
    if np.isnan(row).any() or not np.isfinite(row.max()):
        return (math.nan,) * 4
    highest = row.max()
    weights = np.exp(row - highest)
    p = weights / weights.sum()
    positive = p[p > 0]
    entropy = -math.fsum(positive * np.log(positive))
    return entropy, highest + math.log(weights.sum()), p.max(), p[boundary_id]


class EatSlot:
    """One request's statistics, one probe at a time."""

    def __init__(self, delta: float):
        self.delta = delta
        self.entropies: list[float] = []
        self.mean = self.variance = 0.0
        self.debiased = 0.0
        self.converged = False

    def probe(self, entropy: float, *, alpha: float, warm_up: int, max_entropy: float) -> None:
        if math.isnan(entropy):
            return
        self.entropies.append(entropy)
        count = len(self.entropies)
        if count == 1:
            self.mean, self.variance, self.debiased = entropy, 0.0, math.inf
        else:
            self.mean = alpha * entropy + (1 - alpha) * self.mean
            self.variance = alpha * (entropy - self.mean) ** 2 + (1 - alpha) * self.variance
            self.debiased = self.variance / (1 - (1 - alpha) ** count)
        is_still = self.debiased < self.delta
        self.converged = is_still and count > warm_up and entropy < max_entropy

    def columns(self) -> list[float]:
        """In the order of ``EatColumn``."""
        last = self.entropies[-1] if self.entropies else 0.0
        numbers = [len(self.entropies), last, self.mean, self.variance, self.debiased]
        return [*map(float, numbers), self.delta, float(self.converged)]
