"""Counts beside the scheduler: hits of an infinite cache, and tokens computed twice."""

from collections.abc import Sequence

from meridian_patch.replay.scheduler import BLOCK_SIZE


class InfiniteCache:
    """A prefix cache that never evicts: every block that any request has computed hits."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def add(self, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Remember the full blocks within a request's first ``num_tokens`` tokens."""
        self._hashes.update(hashes[: num_tokens // BLOCK_SIZE])

    def hit_tokens(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Leading tokens of a prompt of ``num_tokens`` that hit."""
        # Load-bearing: the last token of a prompt is always computed, to sample from it.
        usable = hashes[: (num_tokens - 1) // BLOCK_SIZE]
        for index, block_hash in enumerate(usable):
            if block_hash not in self._hashes:
                return index * BLOCK_SIZE
        return len(usable) * BLOCK_SIZE


class RecomputedTokens:
    """Counts tokens that are computed again because a preemption freed them."""

    def __init__(self) -> None:
        self.total = 0
        # Tokens computed so far of a request in prefill, and what a preempted one had computed.
        self._prefilled: dict[str, int] = {}
        self._lost: dict[str, int] = {}

    @property
    def has_open(self) -> bool:
        """Whether any request is in prefill or has lost tokens; otherwise ``ran`` does nothing."""
        return bool(self._lost or self._prefilled)

    def preempted(self, request_id: str, num_known: int) -> None:
        """A request lost its blocks; outside prefill all its ``num_known`` tokens but the last."""
        lost = self._prefilled.pop(request_id, num_known - 1)
        self._lost[request_id] = max(lost, self._lost.get(request_id, 0))

    def ran(self, request_id: str, start: int, end: int, *, is_prefill_chunk: bool) -> int:
        """A step computes the tokens from ``start`` to ``end``; how many of them once more."""
        again = 0
        if self._lost and request_id in self._lost:
            lost = self._lost[request_id]
            again = max(0, min(lost, end) - start)
            self.total += again
            if end >= lost:
                del self._lost[request_id]
        if is_prefill_chunk:
            self._prefilled[request_id] = end
        elif self._prefilled:
            self._prefilled.pop(request_id, None)
        return again

    def forget(self, request_id: str) -> None:
        """A request finished."""
        self._prefilled.pop(request_id, None)
        self._lost.pop(request_id, None)
