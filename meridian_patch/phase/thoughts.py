"""Finds thoughts and markers in a sequence of tokens."""

from collections.abc import Iterator, Sequence

from meridian_patch.phase.boundaries import TokenIds
from meridian_patch.phase.matcher import BoundaryMatcher, Event

# A start and an end marker this close are not a thought: templates write an empty one for turns
# without thinking, and system prompts may show the format.
MAX_SHORT_TOKENS = 32


def find_first_thought(token_ids: Sequence[int], matcher: BoundaryMatcher) -> int | None:
    """Index of the first start marker without an end marker soon after it.

    Takes one pass over the prompt at most.

    Args:
        token_ids: a prompt.
        matcher: finds the boundaries of the served model.

    Returns:
        None if the prompt contains no thought.
    """
    # Starts without an end so far: index, and index behind it, which grows.
    opened: list[tuple[int, int]] = []
    for event, first, behind in matcher.find_all(token_ids):
        if opened and first > opened[0][1] + MAX_SHORT_TOKENS:
            break
        if event is Event.START:
            opened.append((first, behind))
        else:
            opened.clear()
    # Of two spellings that overlap, the longer one may be found later.
    return min(opened)[0] if opened else None


def holds_any(token_ids: Sequence[int], sequences: tuple[TokenIds, ...]) -> bool:
    """Whether ``token_ids`` contains one of ``sequences``."""
    return any(next(_places(token_ids, sequence), None) is not None for sequence in sequences)


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
