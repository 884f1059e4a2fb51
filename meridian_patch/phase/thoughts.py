"""Where thinking stands in a sequence of tokens."""

from collections.abc import Iterator, Sequence

from meridian_patch.phase.boundaries import Boundaries, TokenIds

# Markers this close are no thought: templates write an empty one for turns without thinking, and
# system prompts show the format.
MAX_SHORT_TOKENS = 32


def find_first_thought(token_ids: Sequence[int], boundaries: Boundaries) -> int | None:
    """Index of the first start marker that is not closed again soon.

    Args:
        token_ids: a prompt.
        boundaries: of the served model.

    Returns:
        None when there is no thought in it.
    """
    found = [
        index
        for sequence in boundaries.start
        for index in _first(token_ids, sequence, boundaries.end)
    ]
    return min(found, default=None)


def holds_any(token_ids: Sequence[int], sequences: tuple[TokenIds, ...]) -> bool:
    """Whether one of ``sequences`` stands somewhere in ``token_ids``."""
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
