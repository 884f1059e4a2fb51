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
# A size that was not seen among so many chunks is not known any more.
_FORGOTTEN_AFTER: Final = 1024
# Of fewer tokens the time says little beside what steps differ by.
_LEAST_TOKENS: Final = 64

# Whether it is above the captured graph, and the number of bits of its tokens.
_Size = tuple[bool, int]


class ChunkRates:
    """Seconds per token of prefill, by the size of a step's chunk.

    Sizes are told apart by powers of two, and by whether a captured graph runs the step.

    Attributes:
        largest: the most tokens of a chunk of which the rate is known.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._newest: dict[_Size, deque[tuple[int, float]]] = {}
        # Median size and rate where they are known.
        self._known: dict[_Size, tuple[float, float]] = {}
        self._chunks = 0
        # Number of the newest chunk of each size.
        self._last: dict[_Size, int] = {}

    def add(self, tokens: int, seconds: float, *, is_launched: bool) -> None:
        """Note how much longer than without them a step of so many prefill tokens took."""
        if tokens < _LEAST_TOKENS:
            return
        size = is_launched, tokens.bit_length()
        newest = self._newest.setdefault(size, deque(maxlen=_NEWEST_CHUNKS))
        newest.append((tokens, seconds / tokens))
        self._chunks += 1
        self._last[size] = self._chunks
        if len(newest) >= _LEAST_CHUNKS:
            lengths, rates = zip(*newest, strict=True)
            self._known[size] = median(lengths), median(rates)
        self._forget()
        self.largest = max((tokens for tokens, _ in self._known.values()), default=0.0)

    def worthwhile(self, graph_room: int | None, expected: int) -> int:
        """Tokens of the smallest chunk of a good rate.

        Args:
            graph_room: of the step; a chunk of another size is above the graph.
            expected: what a fit says; it counts for sizes that were not seen.
        """
        if self.largest < min(expected, _ENOUGH_TOKENS):
            return expected
        usable = [
            (tokens if is_launched or graph_room is None else min(tokens, graph_room), rate)
            for (is_launched, bits), (tokens, rate) in self._known.items()
            if is_launched or graph_room is None or 2 ** (bits - 1) <= graph_room
        ]
        if not usable:
            return expected
        most_s = _ENOUGH_TIMES_LEAST * min(rate for _, rate in usable)
        smallest = int(min(tokens for tokens, rate in usable if rate <= most_s))
        worse = int(max((tokens for tokens, _ in usable if tokens < smallest), default=0))
        if not worse:
            return min(smallest, expected)
        half = smallest // 2
        is_seen = any(bits == half.bit_length() for _, bits in self._known)
        return smallest if is_seen or half <= worse else half

    def _forget(self) -> None:
        """What is no longer seen may have changed, or was measured while the engine warmed up."""
        oldest = self._chunks - _FORGOTTEN_AFTER
        for size in [size for size, last in self._last.items() if last < oldest]:
            del self._newest[size], self._last[size]
            self._known.pop(size, None)
