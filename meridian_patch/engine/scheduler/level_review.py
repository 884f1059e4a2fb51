"""Tells the levels how long thoughts are, and has them reviewed from time to time."""

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import Request, RequestStatus

from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.levels import Levels

_REVIEW_STEPS = 128
# Requests that end so say nothing about how long their thoughts would have been.
_CENSORED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


class LevelReview:
    """Follows the thoughts of all requests for the levels.

    Args:
        levels: learn from the thoughts.
        tracker: phases of all requests.
    """

    def __init__(self, levels: Levels, tracker: PhaseTracker) -> None:
        self._levels = levels
        self._tracker = tracker
        # Think tokens of requests that the levels know, and those when a thought ended last.
        self._known: dict[Any, int] = {}
        self._ended: dict[Any, int] = {}
        self._reviewed_at = 0

    def changed(self, request: Request) -> None:
        """Note that a request's phase may have changed."""
        state = self._tracker.get(request.request_id)
        if state is not None and state.phase is Phase.ANSWER:
            self._ends(request, state.think_tokens)

    def turn_ended(self, session: Request) -> None:
        """Note the end of a session's turn, which ends its thought; may be called twice."""
        state = self._tracker.get(session.request_id)
        if state is not None:
            self._ends(session, state.think_tokens)

    def goes_on(self, session: Request) -> None:
        """Note a session's next turn: its think tokens are counted anew."""
        self._known.pop(session, None)
        self._ended.pop(session, None)

    def on_removed(self, request: Request) -> None:
        """Forget a request that finished or was aborted; the tracker still knows it."""
        state = self._tracker.get(request.request_id)
        if state is not None and state.phase is Phase.THINK:
            if request.status in _CENSORED:
                self._tell([(request, state.think_tokens)])
            else:
                self._ends(request, state.think_tokens)
        self._known.pop(request, None)
        self._ended.pop(request, None)

    def review(self, step: int, running: Iterable[Any]) -> bool:
        """Have the levels reviewed, if that is some steps ago.

        Args:
            step: number of the step that is planned.
            running: the running requests; others make no tokens.

        Returns:
            Whether any level changed.
        """
        if step - self._reviewed_at < _REVIEW_STEPS:
            return False
        self._reviewed_at = step
        thinking = []
        for request in running:
            state = self._tracker.get(request.request_id)
            if state is not None and state.phase is Phase.THINK:
                thinking.append((request, state.think_tokens))
        if thinking:
            self._tell(thinking)
        return self._levels.review()

    def _ends(self, request: Request, think_tokens: int) -> None:
        if think_tokens > self._ended.get(request, 0):
            self._tell([(request, think_tokens)])
            self._levels.ended(think_tokens)
            self._ended[request] = think_tokens

    def _tell(self, thoughts: list[tuple[Any, int]]) -> None:
        before = [self._known.get(request, 0) for request, _ in thoughts]
        self._levels.thought(before, [tokens for _, tokens in thoughts])
        self._known.update(thoughts)
