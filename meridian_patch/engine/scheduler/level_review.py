"""Lets the levels learn how long thoughts are, and has them reviewed from time to time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine.request_state import RequestState, RequestStates
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.levels import Levels
from meridian_patch.telemetry import counters

if TYPE_CHECKING:
    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

_REVIEW_STEPS = 128
# Requests that end so say nothing about how long their thoughts would have been.
_CENSORED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


class LevelReview(SchedulerPart):
    """Follows the thoughts of all requests for the levels.

    Args:
        scheduler: the phase-aware scheduler.
        states: records of all requests.
        levels: learn from the thoughts.
        tracker: phases of all requests.
        is_reviewing: whether the levels that count may change, as under ``time_sharing``.
    """

    name = counters.POLICY

    def __init__(
        self,
        scheduler: "PhaseScheduling",
        states: RequestStates,
        levels: Levels,
        tracker: PhaseTracker,
        *,
        is_reviewing: bool,
    ) -> None:
        self._scheduler = scheduler
        self._states = states
        self._levels = levels
        self._tracker = tracker
        self._is_reviewing = is_reviewing
        self._reviewed_at = 0

    def on_phase_changed(self, request: Request) -> None:
        state = self._tracker.get(request.request_id)
        if state is not None and state.phase is Phase.ANSWER:
            self._end_thought(self._states.of(request), state.think_tokens)

    def on_turn_ended(self, session: Request) -> None:
        # The end of a turn, which may be reported twice, ends the thought.
        state = self._tracker.get(session.request_id)
        if state is not None:
            self._end_thought(self._states.of(session), state.think_tokens)

    def on_session_continued(self, session: Request, options: RequestOptions) -> None:
        # Its think tokens are counted anew.
        state = self._states.of(session)
        state.known_tokens = state.ended_tokens = 0

    def on_freed(self, request: Request) -> None:
        state = self._tracker.get(request.request_id)
        if state is None or state.phase is not Phase.THINK:
            return
        if request.status in _CENSORED:
            self._learn([(self._states.of(request), state.think_tokens)])
        else:
            self._end_thought(self._states.of(request), state.think_tokens)

    def before_schedule(self, plan: StepPlan) -> None:
        if not (plan.is_contended and self._is_reviewing and plan.may_admit):
            return
        step = self._scheduler.current_step
        if step - self._reviewed_at < _REVIEW_STEPS:
            return
        self._reviewed_at = step
        self.review()

    def review(self) -> None:
        """Have the levels reviewed: preempted requests get new places if any of them changed."""
        # Requests that do not run make no tokens.
        thinking = []
        for request in self._scheduler.running:
            state = self._tracker.get(request.request_id)
            if state is not None and state.phase is Phase.THINK:
                thinking.append((self._states.of(request), state.think_tokens))
        if thinking:
            self._learn(thinking)
        if self._levels.review():
            self._states.to_move.update(dict.fromkeys(self._states.away))

    def _end_thought(self, request: RequestState, think_tokens: int) -> None:
        if think_tokens > request.ended_tokens:
            self._learn([(request, think_tokens)])
            self._levels.ended(think_tokens)
            request.ended_tokens = think_tokens

    def _learn(self, thoughts: Sequence[tuple[RequestState, int]]) -> None:
        before = [request.known_tokens for request, _ in thoughts]
        self._levels.thought(before, [tokens for _, tokens in thoughts])
        for request, tokens in thoughts:
            request.known_tokens = tokens
