"""Learns from prompts whether clients keep the thoughts of earlier turns.

A chat template may drop them by default and keep them for a client that asks for it. The prompt of
the next turn shows which: it goes on behind the kept tokens of the turn before with the thought of
that turn, or without.
"""

from collections.abc import Hashable, Sequence
from typing import Final

# Turns that are remembered: of more conversations at a time the oldest are forgotten.
_MOST_TURNS: Final = 4096
# Weight of what was seen before, per prompt.
_FORGETTING: Final = 0.98
# Share of prompts with kept thoughts from which on others are taken for such, too. It is below a
# half: to keep a thought in vain is what stock does with each.
_LEAST_SHARE: Final = 0.25


class HistoryEvidence:
    """Compares the blocks of prompts with those of the turns that finished before.

    Blocks are known by hashes that cover all tokens before them, as vLLM's prefix cache has them.
    A prompt that merely begins as another one, and ends within the same block, counts as one whose
    thoughts were dropped.
    """

    def __init__(self) -> None:
        # Last block that the next turn holds in any case: the block behind it, with the thought.
        self._turns: dict[Hashable, Hashable] = {}
        self._kept = self._seen = 0.0

    @property
    def keeps(self) -> bool:
        """Whether a request of which nothing is known is taken for one that keeps its thoughts."""
        return self._kept > 0 and self._kept >= _LEAST_SHARE * self._seen

    def finished(self, blocks: Sequence[Hashable], num_kept: int) -> None:
        """Remember a turn.

        Args:
            blocks: hashes of its full blocks, of prompt and output.
            num_kept: how many of them the next prompt holds even if it drops the thought.
        """
        if not 0 < num_kept < len(blocks):
            return
        last = blocks[num_kept - 1]
        self._turns.pop(last, None)
        self._turns[last] = blocks[num_kept]
        if len(self._turns) > _MOST_TURNS:
            del self._turns[next(iter(self._turns))]

    def of_prompt(self, blocks: Sequence[Hashable]) -> bool | None:
        """Whether a prompt keeps the thought of the turn before; None: it shows neither.

        Args:
            blocks: hashes of its full blocks.
        """
        turns = self._turns
        if not turns:
            return None
        for index in range(len(blocks) - 2, -1, -1):
            thought = turns.get(blocks[index])
            if thought is not None:
                is_kept = blocks[index + 1] == thought
                self._kept = self._kept * _FORGETTING + is_kept
                self._seen = self._seen * _FORGETTING + 1
                return is_kept
        return None
