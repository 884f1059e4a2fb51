"""Forecasts how many KV tokens requests hold and how many more they will need."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.output_lengths import LengthHistogram

Tokens = NDArray[np.float64]
_INFINITE = float("inf")


class KVDemand:
    """Forecasts from the lengths of thoughts and answers that have ended.

    Args:
        reserve_tokens: growth to assume until enough phases have ended.
        fixed_tokens: KV tokens that a request holds independent of its length.
    """

    def __init__(
        self, tracker: PhaseTracker, reserve_tokens: int, fixed_tokens: float = 0.0
    ) -> None:
        self._tracker = tracker
        self._reserve_tokens = reserve_tokens
        self._fixed_tokens = fixed_tokens
        self._think = LengthHistogram()
        self._answer = LengthHistogram()
        # Upper bounds of think tokens, of live requests that have one.
        self._limits: dict[str, int] = {}

    def limit(self, request_id: str, think_tokens: int | None) -> None:
        """Set the upper bound of a request's think tokens; None: no bound is known."""
        if think_tokens is None:
            self._limits.pop(request_id, None)
        else:
            self._limits[request_id] = think_tokens

    def on_removed(self, request: Any, *, is_whole: bool) -> None:
        """Forget a request, and learn its lengths unless it was aborted (``is_whole`` False)."""
        self._limits.pop(request.request_id, None)
        state = self._tracker.get(request.request_id)
        if state is None or not is_whole:
            return
        if state.think_tokens:
            self._think.add(state.think_tokens)
        if state.phase is Phase.ANSWER:
            self._answer.add(state.tokens_in_phase)

    def of(self, requests: Iterable[Any]) -> Tokens:
        """Tokens held and tokens still to come: [requests, 2], in the order of ``requests``."""
        rows = [self._row(request) for request in requests]
        table = np.array(rows, np.float64).reshape(-1, 5)
        held, most, think, answer, may_think = table.T
        growth = self._remaining(self._answer, answer)
        growth = growth + np.minimum(self._remaining(self._think, think), may_think)
        return np.stack((held + self._fixed_tokens, np.minimum(growth, most)), axis=1)

    def _row(self, request: Any) -> tuple[float, float, float, float, float]:
        """Tokens: known, may still generate, in the thought, in the answer, may still think."""
        # Load-bearing: the list behind the property of the same name, which is slower.
        known = len(request._all_token_ids)
        most = request.max_tokens - known + request.num_prompt_tokens
        state = self._tracker.get(request.request_id)
        if state is None:
            return known, most, 0, 0, 0
        phase = state.first_phase if state.phase is Phase.PREFILL else state.phase
        attained = known - state.tokens_before
        if phase is not Phase.THINK:
            return known, most, 0, attained, 0
        limit = self._limits.get(request.request_id)
        may_think = _INFINITE if limit is None else max(limit - attained, 0)
        return known, most, attained, 0, may_think

    def _remaining(self, lengths: LengthHistogram, attained: Tokens) -> Tokens:
        expected = lengths.remaining(attained)
        if expected is None:
            return np.full(len(attained), float(self._reserve_tokens))
        return expected
