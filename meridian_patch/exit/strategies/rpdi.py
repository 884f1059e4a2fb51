"""RPDI (reasoning path deviation index): closes thoughts that have derailed."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import reduce
from itertools import accumulate
from math import isfinite
from operator import add
from typing import Self

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import Firing, Signals, Strategy, ThoughtStart


class Rpdi(Strategy):
    """Closes when the last tokens' entropy is far above the thought's (RPDI, arXiv:2603.14251).

    With token entropies H_1 ... H_i of the raw logits, in nats:

        RPDI_i = (1/W sum of H_(i-W+1) ... H_i) / (1/i sum of H_1 ... H_i)
        fires at the end of a sentence when i >= W and RPDI_i > lambda

    RPDI_i is at most i / W, so it never fires before lambda W tokens. The formula and W = 512,
    lambda = 2 are from two summaries of the paper that agree; the paper's own set of boundary
    tokens is not known.

    O(1) per token. The window's sum is never computed by subtraction, because rounding could lose
    small entropies after large ones. It is the sum of a tail of the previous block of W tokens,
    whose tail sums are computed once, and of the block that is being filled.

    Args:
        window_tokens: W.
        threshold: lambda.
        sentence_ends: ids of tokens that end a sentence or a line.
    """

    reason = "rpdi"
    words = "closed, it had become less sure (RPDI)"
    uses_signals = True

    def __init__(
        self, window_tokens: int, threshold: float, sentence_ends: AbstractSet[int]
    ) -> None:
        self._window_tokens = window_tokens
        self._threshold = threshold
        # The quotient can be above the threshold only after more tokens than this.
        self._earliest = threshold * window_tokens
        self.fires_from = self._earliest
        self._sentence_ends = sentence_ends
        # Sums of the last full block from each index to its end; empty before the first block.
        self._tails: list[float] = []
        self._block: list[float] = []
        self._block_sum = 0.0
        # Count and sum of the tokens in full blocks.
        self._before_count = 0
        self._before_sum = 0.0

    @classmethod
    def of(cls, config: ExitConfig, start: ThoughtStart) -> Self:
        """See ``Strategy``."""
        return cls(config.rpdi_window_tokens, config.rpdi_lambda, start.breaks.sentence)

    @property
    def ratio(self) -> float | None:
        """RPDI so far; None before W tokens, or if all entropies are 0."""
        total = self._before_sum + self._block_sum
        if not self._tails or total <= 0:
            return None
        window = self._tails[len(self._block)] + self._block_sum
        return (window / self._window_tokens) / (total / self._count)

    def accept(self, token_ids: Sequence[int], signals: Signals, first: int) -> Firing | None:
        """See the class."""
        entropies = signals.entropy
        firing, begin = None, 0
        if self._count + len(entropies) > self._earliest:
            for index in range(first, len(token_ids)):
                if token_ids[index] not in self._sentence_ends or not isfinite(entropies[index]):
                    continue
                self._extend(entropies[begin : index + 1])
                begin = index + 1
                ratio = self.ratio
                if self._count > self._earliest and ratio and ratio > self._threshold:
                    firing = Firing(index, self._describe(ratio))
                    break
        self._extend(entropies[begin:])
        return firing

    @property
    def _count(self) -> int:
        return self._before_count + len(self._block)

    def _describe(self, ratio: float) -> str:
        return (
            f"mean entropy of {self._window_tokens} tokens is {ratio:.2f} times the thought's, "
            f"above {self._threshold:.2f}"
        )

    def _extend(self, entropies: Sequence[float]) -> None:
        values = list(filter(isfinite, entropies))
        while values:
            room = self._window_tokens - len(self._block)
            part, values = values[:room], values[room:]
            self._block += part
            # Added one by one, which `sum` does not guarantee: the result must not depend on how
            # many tokens are passed at once.
            self._block_sum = reduce(add, part, self._block_sum)
            if len(part) == room:
                self._tails = list(accumulate(reversed(self._block)))[::-1]
                self._before_count += self._window_tokens
                self._before_sum += self._block_sum
                self._block, self._block_sum = [], 0.0
