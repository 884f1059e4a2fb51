"""Phase-weighted loads of ranks, as the front that places requests on them knows them."""

from collections.abc import Hashable
from typing import Final

from meridian_patch.policy.rank_balance import THINK_WEIGHT

# Weight of each new request in the share of requests that think.
_LEARNING: Final = 0.05


class PlacedLoads:
    """Follows the requests that one front placed.

    vLLM counts requests. A request that thinks stays longer than one that answers already, so it
    counts as ``think_weight``. One without a token yet counts by the share of earlier requests that
    thought: without any, all loads are vLLM's.
    """

    def __init__(self, think_weight: float = THINK_WEIGHT) -> None:
        self._more = think_weight - 1
        # Rank, weight beyond 1 and whether its phase is known, by request id.
        self._placed: dict[str, tuple[Hashable, float, bool]] = {}
        self._extra: dict[Hashable, float] = {}
        self._think_share = 0.0

    def __len__(self) -> int:
        return len(self._placed)

    def beyond_count(self, rank: Hashable) -> float:
        """What the requests placed on a rank weigh more than vLLM counts; at least 0."""
        # Sums of floats may miss 0 by a little.
        return max(self._extra.get(rank, 0.0), 0.0)

    def placed(self, request_id: str, rank: Hashable) -> None:
        """A request was placed on a rank."""
        self.ended(request_id)
        self._set(request_id, rank, self._more * self._think_share, is_known=False)

    def changed(self, request_id: str, *, is_thinking: bool) -> None:
        """A request's phase changed; one that was not placed here is ignored."""
        known = self._placed.get(request_id)
        if known is None:
            return
        rank, _, is_known = known
        if not is_known:
            self._think_share += _LEARNING * (is_thinking - self._think_share)
        self.ended(request_id)
        self._set(request_id, rank, self._more if is_thinking else 0.0, is_known=True)

    def ended(self, request_id: str) -> None:
        """A request is over; unknown ones are ignored."""
        known = self._placed.pop(request_id, None)
        if known is not None:
            self._extra[known[0]] -= known[1]

    def _set(self, request_id: str, rank: Hashable, extra: float, *, is_known: bool) -> None:
        self._placed[request_id] = rank, extra, is_known
        self._extra[rank] = self._extra.get(rank, 0.0) + extra
