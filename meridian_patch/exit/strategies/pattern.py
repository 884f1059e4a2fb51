"""Closes thoughts that hold one of given token sequences."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Self, cast

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.patterns import Sequences
from meridian_patch.exit.strategies.base import Firing, Signals, Strategy, ThoughtStart
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import ROOT, BoundaryMatcher, Event


class PatternExit(Strategy):
    """Closes when a thought holds one of given texts or token sequences.

    It fires at the first token that completes one. A pattern that was completed below the floor is
    passed over: it closes nothing later. O(1) per token, amortised, for any number of patterns.

    Args:
        patterns: the token sequences of each pattern.
    """

    reason = "pattern"
    words = "closed, it said one of the texts to be closed at"

    def __init__(self, patterns: tuple[Sequences, ...]) -> None:
        self._patterns = patterns
        sequences = tuple(ids for pattern in patterns for ids in pattern)
        self._matcher = _matcher_of(sequences)
        self.fires_from = min(map(len, sequences))
        self._longest = max(map(len, sequences))
        self._state = ROOT
        # The last tokens, to tell which pattern they are.
        self._last: list[int] = []

    @classmethod
    def is_on(cls, config: ExitConfig, start: ThoughtStart | None = None) -> bool:
        """See ``Strategy``: there are patterns."""
        del start
        return bool(config.patterns)

    @classmethod
    def of(cls, config: ExitConfig, start: ThoughtStart) -> Self:
        """See ``Strategy``."""
        del start
        # They are tokens since the server started, and since the request was read.
        return cls(cast("tuple[Sequences, ...]", config.patterns))

    def accept(self, token_ids: Sequence[int], signals: Signals, first: int) -> Firing | None:
        """See the class."""
        del signals
        matcher, firing = self._matcher, None
        if self._state != ROOT or not matcher.first_ids.isdisjoint(token_ids):
            for index, token_id in enumerate(token_ids):
                self._state, event = matcher.step(self._state, token_id)
                if event is Event.END and index >= first and firing is None:
                    firing = Firing(index, self._describe(token_ids[: index + 1]))
        self._last = [*self._last, *token_ids][-self._longest :]
        return firing

    def _describe(self, token_ids: Sequence[int]) -> str:
        last = (*self._last, *token_ids)
        number, ids = next(
            (number, ids)
            for number, pattern in enumerate(self._patterns, 1)
            for ids in pattern
            if last[-len(ids) :] == ids
        )
        return f"pattern {number} as tokens {list(ids)}"


@lru_cache(maxsize=64)
def _matcher_of(sequences: Sequences) -> BoundaryMatcher:
    return BoundaryMatcher(Boundaries("patterns", (), sequences, ()))
