"""Measures which sizes of a step's prefill take little time per token."""

from collections import deque
from dataclasses import dataclass, field
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
# A chunk of twice the tokens is tried as long as the last such step made a token's time at most so
# many times what it was. Tokens that take as long as before have no fixed time to share.
_BETTER_RATE: Final = 0.8
# Two sizes are compared if the smaller one is at most this share of the other.
_MOST_SHARE: Final = 0.6
# Of fewer tokens the time says little beside what steps differ by.
_LEAST_TOKENS: Final = 64

# Whether it is above the captured graph, and the number of bits of its tokens.
_Size = tuple[bool, int]


class ChunkRates:
    """Seconds per token of prefill, by the size of a step's chunk.

    Sizes are told apart by powers of two, and by whether a captured graph runs the step.
    """

    def __init__(self) -> None:
        self._seen: dict[_Size, _Seen] = {}
        self._chunks = 0

    def add(self, tokens: int, seconds: float, *, is_launched: bool) -> None:
        """Note how much longer than without them a step of so many prefill tokens took."""
        if tokens < _LEAST_TOKENS:
            return
        self._chunks += 1
        seen = self._seen.setdefault((is_launched, tokens.bit_length()), _Seen())
        seen.add(tokens, seconds / tokens, self._chunks)
        oldest = self._chunks - _FORGOTTEN_AFTER
        # What is no longer seen may have changed, or was measured while the engine warmed up.
        self._seen = {size: each for size, each in self._seen.items() if each.last >= oldest}

    def worthwhile(self, graph_room: int | None, expected: int) -> int:
        """Tokens of the smallest chunk of a good rate.

        Args:
            graph_room: of the step; a chunk of another size is above the graph.
            expected: what a fit says; it counts for sizes that were not seen.
        """
        known = self._known()
        expected = min(expected, _ENOUGH_TOKENS)
        if max((tokens for tokens, _ in known.values()), default=0.0) < expected:
            return expected
        usable = [
            (tokens if is_launched or graph_room is None else min(tokens, graph_room), rate)
            for (is_launched, bits), (tokens, rate) in known.items()
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
        is_seen = any(bits == half.bit_length() for _, bits in known)
        # Between two neighbours there is none to try.
        return smallest if is_seen or half < 2 * worse else half

    def untried(self, dear_s: float, most: int) -> int:
        """Tokens of a larger chunk that may have a better rate; 0: of none.

        Chunks of one size do not tell what a token takes from what a step with prefill takes.

        Args:
            dear_s: none is tried while the largest chunk adds less to a step.
            most: tokens of the largest chunk that a step has room for.
        """
        known = self._known()
        if not known:
            return 0
        (is_launched, _), (largest, rate) = max(known.items(), key=lambda each: each[1][0])
        if largest >= _ENOUGH_TOKENS or largest * rate <= dear_s:
            return 0
        smaller = [
            each
            for (is_other, _), each in known.items()
            if is_other == is_launched and each[0] <= _MOST_SHARE * largest
        ]
        if smaller and rate > _BETTER_RATE * max(smaller)[1]:
            return 0
        larger = min(2 * int(largest), most)
        return larger if largest <= _MOST_SHARE * larger else 0

    def launched_within(self, seconds: float) -> int:
        """Tokens of the largest chunk above the graph that added so little to a step; 0: none."""
        newest = (each.newest for (is_launched, _), each in self._seen.items() if is_launched)
        fits = (n for chunks in newest for n, rate in chunks if n * rate <= seconds)
        return max(fits, default=0)

    def _known(self) -> dict[_Size, tuple[float, float]]:
        """Median tokens and rate of each size of which the rate is known."""
        return {size: each.medians for size, each in self._seen.items() if each.medians}


@dataclass(slots=True)
class _Seen:
    """Chunks of one size.

    Attributes:
        newest: tokens and rates.
        medians: of both; None while there are few.
        last: number of the newest one.
    """

    newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_NEWEST_CHUNKS))
    medians: tuple[float, float] | None = None
    last: int = 0

    def add(self, tokens: int, rate: float, number: int) -> None:
        self.newest.append((tokens, rate))
        self.last = number
        if len(self.newest) >= _LEAST_CHUNKS:
            lengths, rates = zip(*self.newest, strict=True)
            self.medians = median(lengths), median(rates)
