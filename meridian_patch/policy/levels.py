"""Levels of attained service: requests that have had most wait (multi-level feedback)."""

from collections.abc import Sequence
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from meridian_patch.config.policy import PolicyConfig

_NUM: Final = 12
# Ends that are assumed in each level, half as likely per token as those of the level below: with
# little evidence all levels count.
_ASSUMED_ENDS: Final = 3.0
# A level counts where its index is below this share of that of the level it would join.
_DISTINCT: Final = 0.75
# Ends after which what was seen so far weighs half.
_REMEMBERED_ENDS: Final = 1000


class Levels:
    """The level of a request; the lower goes first.

    The first two levels have as many tokens each, and each further one twice those of the one
    before it, so that few changes of level, and few preemptions, separate a short thought from the
    longest one. A level counts only where thoughts that reach it are further from their ends than
    those below; otherwise it is one with them, because who waits there gains nothing by having had
    less.

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
        self._assumed_tokens = _ASSUMED_ENDS * first_tokens * 2.0 ** np.arange(_NUM)
        # By level: thoughts that ended in it, and think tokens in it of all thoughts.
        self._ends = np.zeros(_NUM)
        self._tokens = np.zeros(_NUM)
        # The lowest level that a level is one with.
        self._joined = list(range(_NUM))

    @classmethod
    def of_config(cls, config: PolicyConfig) -> Self:
        """From the configuration."""
        return cls(config.level_tokens, config.prompt_weight)

    def of(self, think_tokens: int, prompt_tokens: int = 0) -> int:
        """Level of a request with so many think tokens so far, and so long a prompt.

        It is the higher of the two. Levels of prompts are never one with others.
        """
        attained = self._joined[self._raw(think_tokens)]
        return max(attained, self._raw(int(self._prompt_weight * prompt_tokens)))

    def thought(self, before: Sequence[int], now: Sequence[int]) -> None:
        """Learn how many think tokens requests have now, and had when this was called before."""
        self._tokens += self._within(now) - self._within(before)

    def ended(self, think_tokens: int) -> None:
        """Learn that a thought ended when its request had so many think tokens."""
        self._ends[self._raw(think_tokens)] += 1
        if self._ends.sum() > _REMEMBERED_ENDS:
            self._ends /= 2
            self._tokens /= 2

    def review(self) -> bool:
        """Decide anew which levels count.

        A level's index is the Gittins index of a thought that reaches it, with a constant rate of
        ends per token within each level (Aalto, Ayesta and Righter, "On the Gittins index in the
        M/G/1 queue", 2009): the greatest quotient, over the levels where one may stop, of the
        probability that the thought ends until there and its expected tokens until there.

        Returns:
            Whether that changed any level.
        """
        rates = (self._ends + _ASSUMED_ENDS) / (self._tokens + self._assumed_tokens)
        # The last level has no end, so a thought in it ends there.
        ending = -np.expm1(-rates * self._widths)
        expected = ending / rates
        joined, lowest = [], 0
        indices = [_index(ending[level:], expected[level:]) for level in range(_NUM)]
        for level, index in enumerate(indices):
            if index < _DISTINCT * indices[lowest]:
                lowest = level
            joined.append(lowest)
        has_changed = joined != self._joined
        self._joined = joined
        return has_changed

    def _raw(self, tokens: int) -> int:
        return min((tokens // self.first_tokens).bit_length(), _NUM - 1)

    def _within(self, thoughts: Sequence[int]) -> NDArray[np.float64]:
        """Tokens that thoughts of these lengths have in each level, all together."""
        within: NDArray[np.float64]
        lengths = np.asarray(thoughts, float)[:, None]
        within = np.clip(lengths - self._lower, 0, self._widths).sum(axis=0)
        return within


def _index(ending: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """The Gittins index of a thought at the first of these levels.

    Args:
        ending: probability, by level, that a thought that reaches the level ends in it.
        expected: tokens that it has in the level, on average.
    """
    reached = np.append(1.0, np.cumprod(1 - ending))
    tokens = np.cumsum(reached[:-1] * expected)
    return float((np.cumsum(reached[:-1] * ending) / tokens).max())
