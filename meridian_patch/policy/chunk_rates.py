"""Measures which sizes of a step's prefill take little time per token."""

from collections import deque
from statistics import median
from typing import Final

# A chunk is large enough if a token of it takes at most so many times the least that one takes.
_ENOUGH_TIMES_LEAST: Final = 4 / 3
# Newest chunks of a size of which the median counts, and after how many it is known.
_NEWEST_CHUNKS, _LEAST_CHUNKS = 9, 3
# If chunks of so many tokens are known, larger ones are not tried for a better rate.
_ENOUGH_TOKENS: Final = 1024
# Of fewer tokens the time says little beside what steps differ by.
_LEAST_TOKENS: Final = 64


class ChunkRates:
    """Seconds per token of prefill, by the size of a step's chunk.

    Sizes are told apart by powers of two, and by whether a captured graph runs the step.

    Attributes:
        largest: the most tokens of a chunk of which the rate is known.
    """

    def __init__(self) -> None:
        self._newest: dict[tuple[bool, int], deque[tuple[int, float]]] = {}
        # Median size and rate where they are known.
        self._known: dict[tuple[bool, int], tuple[float, float]] = {}
        self.largest = 0.0

    def add(self, tokens: int, seconds: float, *, is_launched: bool) -> None:
        """Note how much longer than without them a step of so many prefill tokens took."""
        if tokens < _LEAST_TOKENS:
            return
        key = is_launched, tokens.bit_length()
        newest = self._newest.setdefault(key, deque(maxlen=_NEWEST_CHUNKS))
        newest.append((tokens, seconds / tokens))
        if len(newest) >= _LEAST_CHUNKS:
            sizes, rates = zip(*newest, strict=True)
            self._known[key] = median(sizes), median(rates)
            self.largest = max(self.largest, median(sizes))

    def worthwhile(self, graph_room: int | None, expected: int) -> int:
        """Tokens of the smallest chunk of a good rate.

        Args:
            graph_room: of the step; a chunk of another size is above the graph.
            expected: what a fit says; it counts for sizes that were not seen.
        """
        if self.largest < min(expected, _ENOUGH_TOKENS):
            return expected
        most_s = _ENOUGH_TIMES_LEAST * min((rate for _, rate in self._known.values()), default=0.0)
        good = [
            size
            for (is_launched, _), (size, rate) in self._known.items()
            if rate <= most_s and (is_launched or graph_room is None or size <= graph_room)
        ]
        smallest = int(min(good, default=0))
        has_worse = any(size < smallest for size, _ in self._known.values())
        return smallest if has_worse else min(smallest, expected)
