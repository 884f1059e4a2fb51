"""Finds thoughts and markers in a sequence of tokens."""

from collections.abc import Iterator, Sequence

from meridian_patch.phase.boundaries import Boundaries, TokenIds

# A start and an end marker this close are not a thought: templates write an empty one for turns
# without thinking, and system prompts may show the format.
MAX_SHORT_TOKENS = 32


def find_first_thought(token_ids: Sequence[int], boundaries: Boundaries) -> int | None:
    """Index of the first start marker without an end marker soon after it.

    Args:
        token_ids: a prompt.
        boundaries: boundaries of the served model.

    Returns:
        None if the prompt contains no thought.
    """
    found = [
        index
        for sequence in boundaries.start
        for index in _first(token_ids, sequence, boundaries.end)
    ]
    return min(found, default=None)


def holds_any(token_ids: Sequence[int], sequences: tuple[TokenIds, ...]) -> bool:
    """Whether ``token_ids`` contains one of ``sequences``."""
    return any(next(_places(token_ids, sequence), None) is not None for sequence in sequences)


def _first(token_ids: Sequence[int], start: TokenIds, ends: tuple[TokenIds, ...]) -> Iterator[int]:
    for index in _places(token_ids, start):
        begin = index + len(start)
        if not any(
            holds_any(token_ids[begin : begin + MAX_SHORT_TOKENS + len(end)], (end,))
            for end in ends
        ):
            yield index
            return


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
