"""Closes thoughts in which the model gives the end boundary a high probability."""

from collections.abc import Sequence
from math import isfinite
from typing import Self

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import Firing, Signals, Strategy, ThoughtStart


class EndProbability(Strategy):
    """Closes when the end boundary had a high probability n times, and was not said.

    It fires at the n-th token at which p(end boundary) was at least a threshold. p is the
    probability of the boundary's first token, in softmax of the raw logits that the token was
    sampled from: the model could have ended the thought there but did not. Such tokens need not be
    adjacent, because p is about 0 within a sentence. The rule is specific to this project. It is
    based on the observation of RCPD (arXiv:2508.17627) that p(</think>) indicates a complete
    thought; no threshold is published. For a boundary of several tokens p is less informative,
    because other words may begin with its first token.

    Args:
        threshold: threshold of p, from 0 to 1.
        patience: n, in tokens.
    """

    reason = "end_probability"
    words = "closed, the model could have ended it"
    uses_signals = True

    def __init__(self, threshold: float, patience: int) -> None:
        self._threshold = threshold
        self._patience = patience
        # Number of tokens at which p was at least the threshold.
        self._seen = 0

    @classmethod
    def of(cls, config: ExitConfig, start: ThoughtStart) -> Self:
        """See ``Strategy``."""
        del start
        return cls(config.end_probability_threshold, config.end_probability_patience)

    def accept(self, token_ids: Sequence[int], signals: Signals, first: int) -> Firing | None:
        """See the class."""
        del token_ids
        firing = None
        for index, probability in enumerate(signals.end_prob):
            if probability < self._threshold or not isfinite(probability):
                continue
            self._seen += 1
            if not firing and index >= first and self._seen >= self._patience:
                why = (
                    f"probability {probability:.3f} of the boundary is at least "
                    f"{self._threshold:.3f}, {self._seen} times in this thought"
                )
                firing = Firing(index, why)
        return firing
