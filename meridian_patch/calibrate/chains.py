"""Finds thought and answer in what a model wrote."""

from collections.abc import Sequence
from typing import NamedTuple

from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import BoundaryMatcher, Event


class Chain(NamedTuple):
    """Where the first thought and the answer stand in an output, as token indices.

    Attributes:
        begin: of the thought.
        end: behind its last token; the end marker begins there, if there is one.
        answer: of the answer, behind the last end marker; None when thinking did not end.
    """

    begin: int
    end: int
    answer: int | None


def find_chain(
    prompt: Sequence[int], output: Sequence[int], boundaries: Boundaries
) -> Chain | None:
    """Thought and answer of an output; None where nothing is thought."""
    matcher = BoundaryMatcher(boundaries)
    state = matcher.state_after(prompt)
    begin = 0 if matcher.last_boundary(prompt)[0] is Event.START else None
    end = answer = None
    for index, token_id in enumerate(output):
        state, event = matcher.step(state, token_id)
        if event is Event.START and begin is None:
            begin = index + 1
        elif event is Event.END and begin is not None:
            answer = index + 1
            if end is None:
                end = max(begin, answer - _width(output[:answer], boundaries))
    if begin is None:
        return None
    return Chain(begin, len(output) if end is None else end, answer)


def answer_begin(output: Sequence[int], boundaries: Boundaries) -> int:
    """Index at which the answer begins in the output after a forced close.

    A model may think on and end the thought a second time.
    """
    matcher = BoundaryMatcher(boundaries)
    state, begin = 0, 0
    for index, token_id in enumerate(output):
        state, event = matcher.step(state, token_id)
        if event is Event.END:
            begin = index + 1
    return begin


def _width(known: Sequence[int], boundaries: Boundaries) -> int:
    """Tokens of the end marker that ``known`` ends with."""
    return max(len(ids) for ids in boundaries.end if tuple(known[-len(ids) :]) == ids)
