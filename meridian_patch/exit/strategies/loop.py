"""Closes thoughts that repeat themselves."""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Self

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import Firing, Signals, Strategy, ThoughtStart

# Tokens that are compared at once.
_PART = 64


class LoopBreaker(Strategy):
    """Closes when a thought's last tokens are one pattern, ``min_count`` times in a row.

    The settings mean what they mean in vLLM's ``RepetitionDetectionParams``, which aborts such a
    request. With the thought's tokens t_1 ... t_n it fires at the first n with

        t_j = t_(j-p) for the last p (min_count - 1) tokens t_j, for a p from min to max size

    A smaller pattern counts too, if some of its multiples is in that range.

    A pattern of size p is looked at only once its last p (min_count - 1) tokens can all be equal to
    those p before them. Where they are not, the last unequal token says when that is: at the
    earliest p (min_count - 1) tokens behind it. No token is compared more than three times for the
    same p. So text without loops takes about ln(max / min) / (min_count - 1) comparisons per token,
    and any text at most three per size, nearly all of them in C; vLLM's check takes one per size in
    any text. Neither depends on the thought's length. At most twice max * min_count tokens are
    kept.

    It fires once.

    Args:
        max_pattern_size: greatest p, in tokens.
        min_pattern_size: least p, in tokens; 0 means 1.
        min_count: how often the pattern stands there, at least 2.
    """

    reason = "loop"
    words = "closed, it repeated itself"

    def __init__(self, max_pattern_size: int, min_pattern_size: int, min_count: int) -> None:
        self._max_size = max_pattern_size
        self._min_count = min_count
        # The size that is looked at next for the first time.
        self._next_size = max(min_pattern_size, 1)
        self.fires_from = self._next_size * min_count
        # By size: number of tokens from which on it may fire, the size, and the index of the first
        # token that was not compared yet.
        self._due: list[tuple[int, int, int]] = []
        # The last tokens, and how many came before them.
        self._tokens: list[int] = []
        self._num_dropped = 0
        self._has_fired = False

    @classmethod
    def of(cls, config: ExitConfig, start: ThoughtStart) -> Self:
        """See ``Strategy``."""
        del start
        return cls.of_sizes(config)

    @classmethod
    def of_sizes(cls, config: ExitConfig) -> Self:
        """One with the configured sizes, for tokens of any phase."""
        return cls(
            config.loop_max_pattern_size, config.loop_min_pattern_size, config.loop_min_count
        )

    def accept(self, token_ids: Sequence[int], signals: Signals, first: int) -> Firing | None:
        """See the class."""
        del signals
        if self._has_fired:
            return None
        before = self._num_dropped + len(self._tokens)
        self._tokens += token_ids
        firing = self._look(before + len(token_ids), before + first + 1, before)
        self._has_fired = firing is not None
        self._forget()
        return firing

    def _look(self, count: int, first_count: int, before: int) -> Firing | None:
        """Look at all sizes that are due within the first ``count`` tokens, in their order."""
        due, times = self._due, self._min_count
        while self._next_size * times <= count and self._next_size <= self._max_size:
            heappush(due, (self._next_size * times, self._next_size, self._next_size))
            self._next_size += 1
        while due and due[0][0] <= count:
            at, size, compared = heappop(due)
            unequal = self._last_unequal(size, compared, at)
            if unequal is not None:
                heappush(due, (unequal + 1 + size * (times - 1), size, at))
            elif at >= first_count:
                return Firing(at - before - 1, f"{size} tokens stand there {times} times")
            else:
                # Below the floor. It is not left for long, so that few tokens are kept for it.
                heappush(due, (min(first_count, at + size), size, at))
        return None

    def _last_unequal(self, size: int, begin: int, end: int) -> int | None:
        """Index of the last token from ``begin`` to before ``end`` unlike that ``size`` before."""
        tokens, shift = self._tokens, self._num_dropped
        first, stop = begin - shift, end - shift
        while stop > first:
            last = stop - 1
            # Nearly always unequal. Where text repeats itself, parts are compared, in C.
            if tokens[last] != tokens[last - size]:
                return last + shift
            stop = max(first, stop - _PART)
            if tokens[stop : last + 1] != tokens[stop - size : last + 1 - size]:
                while tokens[last] == tokens[last - size]:
                    last -= 1
                return last + shift
        return None

    def _forget(self) -> None:
        # No size needs tokens further back, because it was looked at since.
        kept = self._max_size * self._min_count
        excess = len(self._tokens) - kept
        if excess > kept:
            del self._tokens[:excess]
            self._num_dropped += excess
