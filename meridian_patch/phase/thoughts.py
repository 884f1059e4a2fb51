"""Finds thoughts and markers in a sequence of tokens."""

from collections.abc import Iterator, Sequence
from heapq import merge

from meridian_patch.phase.boundaries import Boundaries, TokenIds

# A start and an end marker this close are not a thought: templates write an empty one for turns
# without thinking, and system prompts may show the format.
MAX_SHORT_TOKENS = 32


def find_first_thought(token_ids: Sequence[int], boundaries: Boundaries) -> int | None:
    """Index of the first start marker without an end marker soon after it.

    Takes one pass over the prompt for each way to write the start.

    Args:
        token_ids: a prompt.
        boundaries: boundaries of the served model.

    Returns:
        None if the prompt contains no thought.
    """
    found = (_find_open(token_ids, start, boundaries.end) for start in boundaries.start)
    return min((index for index in found if index is not None), default=None)


def holds_any(token_ids: Sequence[int], sequences: tuple[TokenIds, ...]) -> bool:
    """Whether ``token_ids`` contains one of ``sequences``."""
    return any(next(_places(token_ids, sequence), None) is not None for sequence in sequences)


def _find_open(token_ids: Sequence[int], start: TokenIds, ends: tuple[TokenIds, ...]) -> int | None:
    """The first place of ``start`` with no end marker within ``MAX_SHORT_TOKENS`` after it."""
    closing = merge(*(_places(token_ids, end) for end in ends))
    end = next(closing, None)
    for index in _places(token_ids, start):
        begin = index + len(start)
        while end is not None and end < begin:
            end = next(closing, None)
        if end is None or end > begin + MAX_SHORT_TOKENS:
            return index
    return None


def _places(token_ids: Sequence[int], sequence: TokenIds) -> Iterator[int]:
    """Indices at which ``sequence`` begins, in order."""
    index = -1
    while True:
        try:
            # `index` runs in C: a prompt has many tokens and few markers.
            index = token_ids.index(sequence[0], index + 1)
        except ValueError:
            return
        if tuple(token_ids[index : index + len(sequence)]) == sequence:
            yield index
