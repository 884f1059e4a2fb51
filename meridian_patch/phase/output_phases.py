"""Divides a request's output into pieces of thought and of answer, outside of EngineCore."""

from collections.abc import Sequence
from typing import NamedTuple

from meridian_patch.phase.matcher import ROOT, BoundaryMatcher, Event


class Piece(NamedTuple):
    """Adjacent tokens of one phase.

    Attributes:
        stop: index behind its last token.
        is_answer: False for a thought.
    """

    stop: int
    is_answer: bool


class OutputPhases:
    """The phase of each output token of one request.

    The token that completes a boundary belongs to the thought, whether it opens or ends it; to the
    answer where that begins with the boundary, as with a tool call. Earlier tokens of a boundary of
    several tokens belong to the phase before it, because it is not known yet when they come.

    Args:
        matcher: of the served model's boundaries.
        prompt: the prompt's tokens.
    """

    def __init__(self, matcher: BoundaryMatcher, prompt: Sequence[int]) -> None:
        self._matcher = matcher
        self._match_state = matcher.state_after(prompt)
        event, _ = matcher.last_boundary(prompt)
        # Whether a turn began; it matters to what ends a thought for good.
        self._has_turn = matcher.ends_all and matcher.has_turn(prompt)
        self._begin(event)
        # Last boundary, state and whether a turn began, before the last output token.
        self._before_last = event, self._match_state, self._has_turn

    def split(self, token_ids: Sequence[int]) -> list[Piece]:
        """Pieces of the next output tokens, in order; as many as phases are touched."""
        pieces: list[Piece] = []
        for index, token_id in enumerate(token_ids):
            is_answer = self._take(token_id)
            if pieces and pieces[-1].is_answer == is_answer:
                pieces.pop()
            pieces.append(Piece(index + 1, is_answer))
        return pieces

    def continue_with(self, prompt: Sequence[int]) -> None:
        """Take in the next chunk of a streaming session.

        Load-bearing: the model does not see the last output token of the turn before.
        """
        event, state, self._has_turn = self._before_last
        for token_id in prompt:
            if token_id in self._matcher.turn_start:
                # Markers before the turn that the model goes on with are text of messages.
                event, state, self._has_turn = Event.NONE, ROOT, True
            else:
                state, found = self._matcher.step(state, token_id)
                event = found or event
        self._match_state = state
        self._begin(event)

    def _begin(self, event: Event) -> None:
        """Begin an output behind a prompt, whose last boundary this is."""
        self._last_event = event
        self._is_thinking = event is Event.START
        # Whether a tool call that may end a thought began.
        self._is_calling = False
        # Whether no start marker opens another thought. Without turns, the prompt's last end may be
        # that of an earlier one.
        can_end = self._matcher.ends_all and self._has_turn
        self._is_final = event is Event.END and can_end

    def _take(self, token_id: int) -> bool:
        """Advance by a token; returns whether it belongs to the answer."""
        was_thinking = self._is_thinking
        self._before_last = self._last_event, self._match_state, self._has_turn
        if token_id in self._matcher.turn_start:
            # To the session's next turn, which has this output in its prompt.
            self._last_event, self._has_turn = Event.NONE, True
        if self._match_state == ROOT and token_id not in self._matcher.first_ids:
            return not was_thinking
        self._match_state, event = self._matcher.step(self._match_state, token_id)
        self._last_event = event or self._last_event
        if self._matcher.begins_answer(self._match_state):
            self._is_calling, self._is_thinking = True, False
            return True
        if event is not Event.NONE:
            # No marker in the arguments of a tool call opens a thought.
            can_open = not (self._is_calling or self._is_final)
            self._is_thinking = event is Event.START and can_open
            self._is_final |= event is Event.END and self._matcher.ends_all
        return not (was_thinking or self._is_thinking)
