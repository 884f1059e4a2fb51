"""Andes: the request that gains most quality of experience per KV block is served.

Source: Liu et al., "Andes" (arXiv 2404.16283), first version. While the KV pool is nearly full,
every few steps all requests are valued: the quality that a reader would have after a horizon if
served, less that if not. Requests are taken by value per block until the pool is full; the others
are preempted. Deviations: a request that was preempted once or has ``pinned_tokens`` stays, which
stands for the paper's bound on preemptions; quality is 1 - (missing / expected tokens) squared;
the reader reads thoughts too: Andes knows no phases.
"""

from typing import Any

from arms.base import Arm, Rank


class Andes(Arm):
    """Phase-blind.

    Attributes:
        first_token_s: when the reader expects the first token after arrival.
        reading_s: the reader's pace, seconds per token.
        usage: share of the KV pool from which requests are chosen.
        every: steps between two choices.
        horizon: output tokens that a served request is taken to get.
        pinned_tokens: a running request with so many output tokens is not preempted.
    """

    first_token_s: float = 1.0
    reading_s: float = 0.05
    usage: float = 0.9
    every: int = 5
    horizon: int = 50
    pinned_tokens: int = 500

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Position of each waiting request in the last choice.
        self._place: dict[str, int] = {}
        self._arrived_s: dict[str, float] = {}

    def added(self, request: Any) -> None:
        self._arrived_s[request.request_id] = self.clock()

    def left(self, request: Any) -> None:
        del self._arrived_s[request.request_id]
        self._place.pop(request.request_id, None)

    def rank(self, request: Any) -> Rank:
        return self._place.get(request.request_id, len(self._place)), request.arrival_time

    def before_step(self) -> None:
        if self.current_step % self.every or not self.waiting or not self.running:
            return
        if self.kv_cache_manager.usage < self.usage:
            return
        kept = {one for one in self.running if self._is_pinned(one)}
        open_to_choice = [one for one in (*self.running, *self.waiting) if one not in kept]
        blocks = {one: self._num_blocks(one) for one in (*kept, *open_to_choice)}
        ranked = sorted(open_to_choice, key=lambda one: -self._gain(one) / blocks[one])
        left = self.kv_cache_manager.block_pool.num_gpu_blocks - sum(blocks[one] for one in kept)
        chosen = set()
        for request in ranked:
            left -= blocks[request]
            if left < 0:
                break
            chosen.add(request)
        self._place = {one.request_id: place for place, one in enumerate(ranked)}
        self.reorder()
        if any(one in chosen for one in self.waiting):
            self.displace([one for one in self.running if one not in chosen and one not in kept])

    def _is_pinned(self, request: Any) -> bool:
        return request.num_preemptions > 0 or request.num_output_tokens >= self.pinned_tokens

    def _num_blocks(self, request: Any) -> int:
        return -(-(request.num_tokens + self.horizon) // self._size)

    def _gain(self, request: Any) -> float:
        """Quality after the horizon if the request is served, less that if it is not."""
        horizon_s = self.horizon * self.reading_s
        age_s = self.clock() - self._arrived_s[request.request_id] + horizon_s
        expected = (age_s - self.first_token_s) / self.reading_s
        if expected <= 0:
            return 0.0
        got = request.num_output_tokens
        return _quality(got + self.horizon, expected) - _quality(got, expected)


def _quality(got: float, expected: float) -> float:
    return 1.0 - (max(0.0, expected - got) / expected) ** 2
