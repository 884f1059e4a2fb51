"""Thoughts that are not measured: of these only the ends are known, from the phase tracker."""

from dataclasses import dataclass

from meridian_patch.exit.actions import Outcome
from meridian_patch.exit.strategies.base import own_end
from meridian_patch.phase.tracker import RequestPhase


@dataclass(slots=True)
class _Thinker:
    state: RequestPhase
    budget_tokens: int | None
    # Of its thoughts whose end was told.
    told_tokens: int = 0


class UnsampledThoughts:
    """The requests whose thoughts are not measured; a step costs nothing but for ends."""

    def __init__(self) -> None:
        self._thinkers: dict[str, _Thinker] = {}

    def __len__(self) -> int:
        return len(self._thinkers)

    def add(self, request_id: str, state: RequestPhase, budget_tokens: int | None) -> None:
        """A request has begun.

        Args:
            request_id: a name of its own.
            state: its phase, as the tracker keeps it.
            budget_tokens: vLLM's ``thinking_token_budget``; None: none.
        """
        self._thinkers[request_id] = _Thinker(state, budget_tokens)

    def remove(self, request_id: str) -> None:
        """A request is gone; unknown ids are fine."""
        self._thinkers.pop(request_id, None)

    def ended(self, request_id: str) -> tuple[Outcome, int] | None:
        """A request's phase changed.

        Returns:
            How the thought ended that did, and the think tokens of all that ended; None when
            none did, or the request is not here.
        """
        thinker = self._thinkers.get(request_id)
        if thinker is None or thinker.state.think_tokens_before == thinker.told_tokens:
            return None
        all_tokens = thinker.state.think_tokens_before
        think_tokens, thinker.told_tokens = all_tokens - thinker.told_tokens, all_tokens
        reason = own_end(think_tokens, thinker.budget_tokens)
        return Outcome(reason, think_tokens, None, 0, is_measured=False), all_tokens
