"""Chooses the thinkers to preempt for a request of a lower level: time-sharing by attained service.

The levels are those of multi-level feedback queues (Corbató et al., 1962), as FastServe uses them
for generated tokens (Wu et al., 2023).
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

# Upper bound of thinkers that are looked at for one request.
_MOST_TRIED = 32

Thinker = TypeVar("Thinker")


def choose_thinkers(
    thinkers: Iterable[Thinker], missing_blocks: int, freed: Callable[[Thinker], int]
) -> list[Thinker]:
    """The thinkers to preempt for a request; empty if they would not free enough blocks.

    These are the first ones that suffice together, less those among them that the others do
    without.

    Args:
        thinkers: running thinkers that may be preempted, in the order in which they make room.
        missing_blocks: KV blocks that the request lacks; 0 or less if it lacks a seat only.
        freed: returns the KV blocks that a preemption of a thinker would free.
    """
    tried: list[tuple[Thinker, int]] = []
    surplus = -missing_blocks
    for thinker in islice(thinkers, _MOST_TRIED):
        blocks = freed(thinker)
        tried.append((thinker, blocks))
        surplus += blocks
        if surplus >= 0:
            break
    else:
        return []
    chosen = []
    for thinker, blocks in tried[:-1]:
        if surplus >= blocks:
            surplus -= blocks
        else:
            chosen.append(thinker)
    return [*chosen, tried[-1][0]]
