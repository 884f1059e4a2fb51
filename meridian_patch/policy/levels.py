"""Levels of attained service: who has had most waits for whom (multi-level feedback)."""

from collections.abc import Iterable
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from meridian_patch.config.policy import PolicyConfig

_NUM: Final = 12
# Thoughts of each level whose ends are assumed before any is seen: half as likely per token as
# those of the level below, so that all levels count at first.
_ASSUMED_ENDS: Final = 3.0
# A level counts where its index is below this share of that of the level it would join.
_DISTINCT: Final = 0.75
# Ends after which what was seen so far weighs half.
_REMEMBERED_ENDS: Final = 1000


class Levels:
    """The level of a request; the lower goes first.

    Each level holds twice the tokens of the one before it, so that few changes of level, and few
    preemptions, separate a short thought from the longest one. A level counts only where thoughts
    that reached it are further from their ends than those below; otherwise it is one with them,
    because who waits there gains nothing by having had less.

    Args:
        first_tokens: tokens with which level 0 ends.
        prompt_weight: think tokens that a prompt token counts as. A prompt takes its share of the
            steps and of the KV pool, and its length is known before it begins.
    """

    def __init__(self, first_tokens: int, prompt_weight: float) -> None:
        self.first_tokens = first_tokens
        self._prompt_weight = prompt_weight
        self._lower = first_tokens * np.append(0.0, 2.0 ** np.arange(_NUM - 1))
        self._widths = np.append(np.diff(self._lower), np.inf)
        # By level: thoughts that ended in it, and think tokens in it of all thoughts.
        self._ends = np.full(_NUM, _ASSUMED_ENDS)
        self._tokens = _ASSUMED_ENDS * first_tokens * 2.0 ** np.arange(_NUM)
        # The lowest level that a level is one with.
        self._joined = list(range(_NUM))

    @classmethod
    def of_config(cls, config: PolicyConfig) -> Self:
        """From the configuration."""
        return cls(config.level_tokens, config.prompt_weight)

    def of(self, think_tokens: int, prompt_tokens: int = 0) -> int:
        """Level of a request with so many think tokens so far, and so long a prompt.

        It is the higher of the two: a prompt below the first level's length changes nothing. The
        prompt counts while the request waits, not while it thinks and holds what it needs.
        """
        attained = self._joined[self._raw(think_tokens)]
        return max(attained, self._raw(int(self._prompt_weight * prompt_tokens)))

    def thought(self, begin: int, end: int, *, has_ended: bool) -> None:
        """Learn from a thought.

        Args:
            begin: think tokens of its request before it.
            end: think tokens of its request when it ended, or when its request left.
            has_ended: whether it came to its end.
        """
        self._tokens += self._within(np.array([end])) - self._within(np.array([begin]))
        if has_ended:
            self._ends[self._raw(end)] += 1
            if self._ends.sum() > _REMEMBERED_ENDS:
                self._ends /= 2
                self._tokens /= 2

    def review(self, thinking: Iterable[int]) -> bool:
        """Decide anew which levels count.

        A level's index is the Gittins index of a thought that reaches it, with a constant rate of
        ends per token within each level (Aalto, Ayesta and Righter, "On the Gittins index in the
        M/G/1 queue", 2009): the greatest quotient, over the levels where one may stop, of the
        probability that the thought ends until there and its expected tokens until there.

        Args:
            thinking: think tokens so far of the thoughts that have not ended.

        Returns:
            Whether that changed any level.
        """
        rates = self._ends / (self._tokens + self._within(np.fromiter(thinking, float)))
        # The last level has no end.
        passing = np.append(np.exp(-rates[:-1] * self._widths[:-1]), 0.0)
        expected = (1 - passing) / rates
        joined, lowest = [], 0
        indices = [_index(passing[level:], expected[level:]) for level in range(_NUM)]
        for level, index in enumerate(indices):
            if index < _DISTINCT * indices[lowest]:
                lowest = level
            joined.append(lowest)
        has_changed = joined != self._joined
        self._joined = joined
        return has_changed

    def _raw(self, tokens: int) -> int:
        return min((tokens // self.first_tokens).bit_length(), _NUM - 1)

    def _within(self, thoughts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that thoughts of these lengths have in each level, all together."""
        within: NDArray[np.float64]
        within = np.clip(thoughts[:, None] - self._lower, 0, self._widths).sum(axis=0)
        return within


def _index(passing: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """The Gittins index of a thought at the first of these levels."""
    reached = np.append(1.0, np.cumprod(passing))
    return float(((1 - reached[1:]) / np.cumsum(reached[:-1] * expected)).max())
