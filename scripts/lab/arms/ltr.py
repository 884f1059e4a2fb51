"""LTR: shortest predicted output first, preemptively.

Source: Fu et al., "Efficient LLM Scheduling by Learning to Rank" (arXiv 2408.15792). In each step
running and waiting requests are sorted by predicted length and taken while memory lasts; one that
has waited too long is promoted for a quantum. Deviations: no predictor is run: the length is the
true one times a lognormal error, drawn once per request; starvation is counted in seconds.
"""

import math
import random
from typing import Any

from arms.base import Arm, Rank


class Ltr(Arm):
    """Phase-blind: the whole output counts.

    Attributes:
        sigma: standard deviation of the logarithm of the predictor's error. With 0.6 the rank
            correlation on s-prod is about 0.85 (Kendall's tau about 0.65, as the paper reports).
        quantum: output tokens for which a starved request stays promoted.
    """

    displaces = True
    aging_s = 30.0
    sigma: float = 0.6
    quantum: int = 512

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._predicted: dict[str, float] = {}
        # Of promoted requests, the output tokens up to which they are.
        self._promoted: dict[str, int] = {}

    def rank(self, request: Any) -> Rank:
        name = request.request_id
        is_promoted = request.num_output_tokens < self._promoted.get(name, 0)
        return not is_promoted, self._predicted[name]

    def added(self, request: Any) -> None:
        lengths = self.facts.lengths[request.request_id]
        # By request: another order of arrivals draws the same errors.
        draw = random.Random(f"{self.facts.seed} {request.request_id}")
        error = math.exp(draw.gauss(0.0, self.sigma))
        self._predicted[request.request_id] = (lengths.think + lengths.answer) * error

    def aged(self, request: Any) -> None:
        self._promoted[request.request_id] = request.num_output_tokens + self.quantum

    def left(self, request: Any) -> None:
        del self._predicted[request.request_id]
        self._promoted.pop(request.request_id, None)


class LtrAnswers(Ltr):
    """The same among thinkers; answers first and never displaced, and the step cut."""

    answers_first = True
    cut_factor = 1.17
