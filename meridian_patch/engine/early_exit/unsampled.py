"""Records the ends of thoughts that are not measured, from the phase tracker."""

from dataclasses import dataclass

from meridian_patch.exit.actions import Outcome
from meridian_patch.exit.strategies.base import UNANSWERED, budget_left, own_end
from meridian_patch.phase.tracker import Phase, RequestPhase


@dataclass(slots=True)
class _UnsampledThought:
    state: RequestPhase
    budget_tokens: int | None
    # What the prompt has of the current thought behind its start marker.
    given_tokens: int
    # Think tokens of its thoughts whose end was reported.
    reported_tokens: int = 0


class UnsampledThoughts:
    """The requests whose thoughts are not measured; only steps that end a thought cost time."""

    def __init__(self) -> None:
        self._thinkers: dict[str, _UnsampledThought] = {}

    def __len__(self) -> int:
        return len(self._thinkers)

    def add(self, request_id: str, state: RequestPhase, budget_tokens: int | None) -> None:
        """Add a request in its first step.

        Args:
            request_id: the request's unique id.
            state: its phase, as the tracker keeps it.
            budget_tokens: vLLM's ``thinking_token_budget``; None: it has none.
        """
        given = state.given_think_tokens
        self._thinkers[request_id] = _UnsampledThought(state, budget_tokens, given)

    def remove(self, request_id: str) -> tuple[Outcome, int] | None:
        """Forget a request; unknown ids are ignored.

        Returns:
            The outcome of the thought in which it is, and the think tokens of all its thoughts;
            None if it is in none.
        """
        thinker = self._thinkers.pop(request_id, None)
        if thinker is None or thinker.state.phase is not Phase.THINK:
            return None
        all_tokens = thinker.state.think_tokens
        think_tokens = all_tokens - thinker.reported_tokens
        return Outcome(UNANSWERED, think_tokens, None, 0, is_measured=False), all_tokens

    def ended(self, request_id: str) -> tuple[Outcome, int] | None:
        """Find out whether a change of phase ended a thought.

        Returns:
            The outcome of that thought, and the think tokens of all thoughts that ended; None if
            no thought ended, or the request is unknown.
        """
        thinker = self._thinkers.get(request_id)
        if thinker is None or thinker.state.think_tokens_before == thinker.reported_tokens:
            return None
        all_tokens = thinker.state.think_tokens_before
        think_tokens, thinker.reported_tokens = all_tokens - thinker.reported_tokens, all_tokens
        reason = own_end(think_tokens, budget_left(thinker.budget_tokens, thinker.given_tokens))
        thinker.given_tokens = 0
        return Outcome(reason, think_tokens, None, 0, is_measured=False), all_tokens
