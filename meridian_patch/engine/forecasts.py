"""What requests hold of the KV pool and what they will add to it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meridian_patch.phase.router import Phase, PhaseRouter
from meridian_patch.policy.admission import Forecast
from meridian_patch.policy.lengths import LengthHistogram

Counts = NDArray[np.int64]
Tokens = NDArray[np.float64]


class Forecasts:
    """Forecasts from the lengths of the phases that ended so far.

    Args:
        reserve_tokens: growth that is expected before enough phases have ended.
    """

    def __init__(self, router: PhaseRouter, reserve_tokens: int) -> None:
        self._router = router
        self._reserve_tokens = reserve_tokens
        self._think = LengthHistogram()
        self._answer = LengthHistogram()
        # Most think tokens, of live requests that have such a bound.
        self._limits: dict[str, int] = {}

    def limit(self, request_id: str, think_tokens: int) -> None:
        """The request will think no longer than this."""
        self._limits[request_id] = think_tokens

    def left(self, request: Any, *, is_whole: bool) -> None:
        """A request is gone; what was aborted says nothing of lengths."""
        self._limits.pop(request.request_id, None)
        state = self._router.get(request.request_id)
        if state is None or not is_whole:
            return
        if state.think_tokens:
            self._think.add(state.think_tokens)
        if state.phase is Phase.ANSWER:
            self._answer.add(state.tokens_in_phase)

    def of(self, requests: Iterable[Any]) -> list[Forecast]:
        """In the order of ``requests``."""
        chosen = list(requests)
        think, answer = (np.zeros(len(chosen), np.int64) for _ in range(2))
        # Tokens that a request may still think; 0 for one that does not.
        may_think = np.zeros(len(chosen))
        for index, request in enumerate(chosen):
            state = self._router.get(request.request_id)
            if state is None:
                continue
            phase = state.first_phase if state.phase is Phase.PREFILL else state.phase
            if phase is Phase.THINK:
                think[index] = state.tokens_in_phase
                limit = self._limits.get(request.request_id)
                may_think[index] = np.inf if limit is None else max(limit - think[index], 0)
            else:
                answer[index] = state.tokens_in_phase
        growth = self._remaining(self._answer, answer)
        growth = growth + np.minimum(self._remaining(self._think, think), may_think)
        return [
            Forecast(float(request.num_tokens), float(min(expected, _most(request))))
            for request, expected in zip(chosen, growth, strict=True)
        ]

    def _remaining(self, lengths: LengthHistogram, attained: Counts) -> Tokens:
        expected = lengths.remaining(attained)
        if expected is None:
            return np.full(len(attained), float(self._reserve_tokens))
        return expected


def _most(request: Any) -> int:
    """Tokens that the request may still make."""
    return max(int(request.max_tokens) - int(request.num_output_tokens), 0)
