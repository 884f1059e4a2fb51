"""EAT (entropy after </think>): closes thoughts that have converged."""

import math
from typing import Self

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import Strategy, ThoughtStart


class Eat(Strategy):
    """Closes when the entropy after a trial boundary is steady and low (EAT, arXiv:2509.26522).

    With probe entropies x_1, x_2, ... in nats:

        m_1 = x_1                              v_1 = 0
        m_n = alpha x_n + (1 - alpha) m_(n-1)  v_n = alpha (x_n - m_n)^2 + (1 - alpha) v_(n-1)
        fires when n > warmup, v_n / (1 - (1 - alpha)^n) < delta, and x_n < max_entropy

    Recurrences and warm-up are those of the authors' code (xidulu/EAT), in nats instead of bits:
    1 bit squared is 0.4805 nats squared. The division corrects for v_1 = 0, as in
    xidulu/reasoning_risk_control. The last condition is optional in the authors' code: a steady
    high entropy is not convergence.

    Args:
        alpha: weight of the newest probe, between 0 and 1.
        delta: bound of the variance, in nats squared.
        warmup_probes: number of probes before the rule applies.
        max_entropy_nats: bound of the last probe's entropy; None: no bound.
    """

    reason = "eat"
    words = "closed, its conclusion had settled (EAT)"
    settings = ("eat", "probe")
    uses_signals = True
    uses_probes = True
    # Only probes make it fire.
    fires_from = math.inf

    def __init__(
        self, alpha: float, delta: float, warmup_probes: int, max_entropy_nats: float | None
    ) -> None:
        self._alpha = alpha
        self._delta = delta
        self.warmup_probes = warmup_probes
        self._max_entropy_nats = math.inf if max_entropy_nats is None else max_entropy_nats
        self._mean = 0.0
        self._biased_variance = 0.0
        # Probes so far.
        self.count = 0

    @classmethod
    def of(cls, config: ExitConfig, start: ThoughtStart) -> Self:
        """See ``Strategy``."""
        del start
        return cls(
            config.eat_alpha,
            config.eat_delta,
            config.eat_warmup_probes,
            config.eat_max_entropy_nats,
        )

    @property
    def variance(self) -> float:
        """Debiased variance of the probes so far, in nats squared; infinite before the first."""
        if not self.count:
            return math.inf
        return self._biased_variance / (1 - (1 - self._alpha) ** self.count)

    @property
    def is_warm(self) -> bool:
        """Whether there were enough probes for the rule to apply."""
        return self.count > self.warmup_probes

    def probed(self, entropy_nats: float) -> str | None:
        """See the class."""
        if not math.isfinite(entropy_nats):
            return None
        alpha = self._alpha
        if not self.count:
            self._mean = entropy_nats
        else:
            self._mean = alpha * entropy_nats + (1 - alpha) * self._mean
            deviation = entropy_nats - self._mean
            self._biased_variance = alpha * deviation**2 + (1 - alpha) * self._biased_variance
        self.count += 1
        is_sure = entropy_nats < self._max_entropy_nats
        if not (self.is_warm and is_sure and self.variance < self._delta):
            return None
        return (
            f"variance {self.variance:.2e} nats^2 of {self.count} probes is below "
            f"{self._delta:.2e}; entropy {entropy_nats:.3f} nats"
        )
