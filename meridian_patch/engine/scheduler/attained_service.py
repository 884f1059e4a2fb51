"""Levels of requests by think and prompt tokens; aged requests; steps that are left to stock."""

from vllm.v1.request import Request

from meridian_patch.engine.request_state import RequestState, RequestStates
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.levels import Levels


class StockSteps:
    """When all is done as in stock: no request thinks, and none waits behind later ones.

    Args:
        tracker: phases of all requests.
        states: records of all requests.

    Attributes:
        are_all: whether the policy was switched to ``noop`` while the engine runs.
    """

    def __init__(self, tracker: PhaseTracker, states: RequestStates) -> None:
        self.are_all = False
        self._tracker = tracker
        self._states = states

    def is_next(self, *, is_answered_elsewhere: bool) -> bool:
        """Whether the next step is one of them."""
        if self.are_all:
            return True
        reasoning = self._tracker.num_reasoning or is_answered_elsewhere
        return not (reasoning or self._states.overtaken)


class AttainedService:
    """Levels of requests, and which of them have waited for so long that levels do not count.

    Args:
        states: records of all requests.
        tracker: phases of all requests.
        levels: the levels of think tokens and prompts.
        aging_s: a preempted request that has waited for so long goes before all others, and
            thinkers of any level are preempted for it.
    """

    def __init__(
        self, states: RequestStates, tracker: PhaseTracker, levels: Levels, aging_s: float
    ) -> None:
        self.aging_s = aging_s
        self._away = states.away
        self._tracker = tracker
        self._levels = levels

    @property
    def first_tokens(self) -> int:
        """Think tokens with which level 0 ends."""
        return self._levels.first_tokens

    def level_of_prompt(self, request: Request) -> int:
        """Level of a new request."""
        return self._levels.of(0, request.num_prompt_tokens)

    def level(self, request: Request) -> int:
        """Level of a request."""
        return self._levels.of(self._attained(request), request.num_prompt_tokens)

    def level_of_thought(self, think_tokens: int) -> int:
        """Level of a running request, whose prompt is computed."""
        return self._levels.of(think_tokens)

    def level_in_queue(self, request: Request) -> int | None:
        """Level at which a preempted request waits; None: it keeps its place.

        Preempted answers are brought forward.
        """
        state = self._tracker.get(request.request_id)
        return None if state is None or state.phase is Phase.ANSWER else self.level(request)

    def is_answering(self, request: Request) -> bool:
        """Whether a request answers; one that is not tracked does."""
        state = self._tracker.get(request.request_id)
        return state is None or state.phase is Phase.ANSWER

    def is_aged(self, state: RequestState, now_s: float) -> bool:
        """Whether a preempted request goes before all others."""
        since_s = state.away_s if state in self._away else now_s
        return now_s - since_s >= self.aging_s

    def make_safe(self, state: RequestState, tokens: int) -> None:
        """Let a request make room only when it has thought for so many more tokens."""
        until = self._attained(state.request) + tokens
        state.safe_tokens = max(until, state.safe_tokens)

    def _attained(self, request: Request) -> int:
        state = self._tracker.get(request.request_id)
        return state.think_tokens if state else 0
