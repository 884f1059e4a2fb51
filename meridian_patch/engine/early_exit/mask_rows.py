"""The bit masks of one step: those of structured output, and those of early exit beside them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import GrammarOutput

# Mask word of a row that allows every token.
_FREE = -1


class MaskRows:
    """Adds rows to the ``GrammarOutput`` of a step.

    Args:
        grammar: the masks of structured output, which stay as they are; None: there are none.
        words: mask words of a row, 32 tokens each, where there are none yet.
        rows_of: number of rows that a request has in the step, by its id.
    """

    def __init__(
        self, grammar: GrammarOutput | None, words: int, rows_of: Callable[[str], int]
    ) -> None:
        self._grammar = grammar
        self._rows_of = rows_of
        # Load-bearing: masks are as wide as the grammar's vocabulary, which may be wider than the
        # logits: Guidance uses the tokenizer's size if that is greater.
        self._words = words if grammar is None else grammar.grammar_bitmask.shape[1]
        self._names, self._acceptable = _parts(grammar)
        self._rows = None if grammar is None else grammar.grammar_bitmask.copy()
        self._added: list[NDArray[np.int32]] = []

    def force(self, name: str, token_id: int) -> None:
        """Leave a request one token to sample, without drafts."""
        mask = mask_of(token_id, self._words)
        place = self._place_of(name)
        if place is not None and self._rows is not None:
            # The row of structured output allows every token, or its grammar accepts this one.
            self._rows[place.start] = mask
            self._acceptable[self._names.index(name)] = 0
            return
        free = np.full((self._rows_of(name) - 1, self._words), _FREE, np.int32)
        self._add(name, np.concatenate((mask[None], free)), 0)

    def forbid(self, name: str, token_ids: Sequence[int]) -> None:
        """Take tokens out of what a request may sample, in all of its rows."""
        allowed = mask_without(token_ids, self._words)
        place = self._place_of(name)
        if place is not None and self._rows is not None:
            left = self._rows[place] & allowed
            # A grammar that accepts nothing else keeps its row.
            self._rows[place] = np.where(left.any(axis=1, keepdims=True), left, self._rows[place])
            return
        number = self._rows_of(name)
        self._add(name, np.tile(allowed, (number, 1)), number - 1)

    def output(self) -> GrammarOutput | None:
        """All masks of the step; None: there are none."""
        parts = self._added if self._rows is None else [self._rows, *self._added]
        if not parts:
            return None
        return GrammarOutput(self._names, np.concatenate(parts), self._acceptable)

    def _add(self, name: str, rows: NDArray[np.int32], acceptable: int) -> None:
        self._names.append(name)
        self._added.append(rows)
        # Load-bearing: number of drafts of a request that its rows were computed for.
        self._acceptable.append(acceptable)

    def _place_of(self, name: str) -> slice | None:
        """Rows of a request that structured output has; None: it has none."""
        given = () if self._grammar is None else self._grammar.structured_output_request_ids
        if name not in given:
            return None
        first = sum(self._rows_of(each) for each in given[: given.index(name)])
        return slice(first, first + self._rows_of(name))


def mask_of(token_id: int, words: int) -> NDArray[np.int32]:
    """Bit mask that allows one token, [words] of 32 tokens each, the first in the lowest bit."""
    mask = np.zeros(words, np.uint32)
    mask[token_id // 32] = 1 << (token_id % 32)
    return mask.view(np.int32)


def mask_without(token_ids: Sequence[int], words: int) -> NDArray[np.int32]:
    """Bit mask that allows all tokens but these, [words]."""
    mask = np.full(words, _FREE, np.int32)
    for token_id in token_ids:
        mask &= ~mask_of(token_id, words)
    return mask


def _parts(grammar: Any) -> tuple[list[str], list[int]]:
    if grammar is None:
        return [], []
    names = list(grammar.structured_output_request_ids)
    acceptable = grammar.num_acceptable_drafts
    return names, [0] * len(names) if acceptable is None else list(acceptable)
