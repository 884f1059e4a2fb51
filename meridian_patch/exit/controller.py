"""Decides when to close and when to probe the thinking of one request."""

from collections.abc import Sequence

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.actions import NO_OBSTACLES, Action, Outcome, Probe
from meridian_patch.exit.strategies.base import (
    UNANSWERED,
    ThoughtStart,
    TokenSignals,
    budget_left,
    own_end,
)
from meridian_patch.exit.text_breaks import Breaks
from meridian_patch.exit.thought_monitor import ThoughtMonitor
from meridian_patch.phase.tracker import Phase, RequestPhase


class ExitController:
    """Watches one request's thoughts, one after the other.

    1. In mode ``off`` it returns no action. In ``observe`` it returns probes, and verdicts are only
       kept in the outcome. In ``enforce`` it also returns closes, one per thought.
    2. After an end boundary it returns no action until a new thought starts. The new thought has a
       new monitor: floor and strategies apply to each thought separately. ``max_think_tokens``
       bounds all thoughts together: a new one has what the earlier ones left.

    Tokens may become known late, so an action may come later than the token at which it is due.

    Args:
        config: the request's configuration.
        breaks: text breaks of the served vocabulary.
        budget_tokens: vLLM's ``thinking_token_budget``; None: it has none.
        closes_by: known tokens, prompt included, behind which a close must begin, so that the
            answer has its reserve; None: there is none.

    Attributes:
        thought: the current thought; None outside of one, and always in mode ``off``.
        num_thoughts: number of thoughts so far, including the current one.
        outcome: how the last thought ended; None before the first did.
    """

    def __init__(
        self,
        config: ExitConfig,
        breaks: Breaks,
        budget_tokens: int | None = None,
        closes_by: int | None = None,
    ) -> None:
        self._config = config
        self._breaks = breaks
        self._budget_tokens = budget_tokens
        self._closes_by = closes_by
        # What vLLM's budget leaves to the current thought.
        self._budget_left = budget_tokens
        self.thought: ThoughtMonitor | None = None
        self.num_thoughts = 0
        self._is_closing = self._is_silent = False
        self.outcome: Outcome | None = None

    def start(
        self,
        think_tokens: int = 0,
        *,
        earlier_tokens: int = 0,
        begin: int = 0,
        given_tokens: int = 0,
    ) -> None:
        """Begin a thought: the one that the prompt opens, or one after a new start marker.

        Args:
            think_tokens: number of its tokens so far, which were not measured.
            earlier_tokens: think tokens of the request before this thought.
            begin: known tokens of the request, prompt included, before this thought.
            given_tokens: what the prompt has of this thought behind its start marker.
        """
        if self._config.mode == "off":
            return
        self.num_thoughts += 1
        self._is_closing = False
        room = None if self._closes_by is None else self._closes_by - begin
        self._budget_left = budget_left(self._budget_tokens, given_tokens)
        start = ThoughtStart(self._breaks, self._budget_left, think_tokens, earlier_tokens, room)
        self.thought = ThoughtMonitor(self.num_thoughts, self._config, start)

    def accept(self, token_ids: Sequence[int], rows: Sequence[TokenSignals]) -> Action | None:
        """Process accepted think tokens; for a step that ends the thought, call ``end`` instead.

        Args:
            token_ids: tokens of one or more steps, in order.
            rows: their signals, one row per token.

        Returns:
            The action to take now; None: no action.
        """
        if self.thought is None:
            return None
        action = self.thought.accept(token_ids, rows)
        return None if action is None else self._permitted(action)

    def probed(self, probe: Probe, entropy_nats: float) -> Action | None:
        """Process a probe's result; it is dropped if it is of another thought or out of order."""
        if self.thought is None:
            return None
        action = self.thought.probed(probe, entropy_nats)
        return None if action is None else self._permitted(action)

    def closing(self) -> None:
        """Note that the close is being forced, so the thought no longer ends by itself."""
        self._is_closing = True

    def stop_acting(self) -> None:
        """Return no action any more; verdicts are only kept in the outcome."""
        self._is_silent = True

    def end(self, num_tokens: int, *, is_answered: bool = True) -> Outcome | None:
        """End the thought, because the boundary was accepted, or because its request ended.

        Args:
            num_tokens: think tokens that were not passed to ``accept``, including the boundary's.
            is_answered: False if the request ended in the thought.

        Returns:
            The outcome; None if the request was not in a thought.
        """
        thought, self.thought = self.thought, None
        if thought is None:
            return None
        think_tokens = thought.think_tokens + num_tokens
        if not is_answered:
            reason = UNANSWERED
        elif self._is_closing and thought.verdict:
            reason = thought.verdict.reason
        else:
            reason = own_end(think_tokens, self._budget_left)
        self.outcome = Outcome(
            reason,
            think_tokens,
            thought.verdict,
            thought.num_invalid,
            too_soon=NO_OBSTACLES if thought.verdict else thought.too_soon(),
        )
        return self.outcome

    def _permitted(self, action: Action) -> Action | None:
        is_kept = action.close is not None and self._config.mode != "enforce"
        return None if is_kept or self._is_silent else action


def follow(
    controller: ExitController, state: RequestPhase, seen: int, rows: Sequence[TokenSignals]
) -> Action | None:
    """Process the tokens of a request after its first ``seen`` known tokens.

    A boundary among these tokens ends the thought. The tokens before it are then not judged,
    because the thought can no longer be closed.

    Args:
        controller: the request's controller.
        state: the request's phase, after the tracker has observed these tokens.
        seen: number of known tokens that were processed before.
        rows: signals of the new tokens, one row each.

    Returns:
        The action to take now; None: no action.
    """
    if state.phase is not Phase.THINK:
        controller.end(max(state.tokens_before - seen, 0))
        return None
    begin = state.tokens_before
    if begin > seen:
        # An earlier thought ended among these tokens too; its length is not recorded.
        controller.end(0)
    if controller.thought is None:
        controller.start(
            max(seen - begin, 0),
            earlier_tokens=state.think_tokens_before,
            begin=begin,
            given_tokens=state.given_think_tokens if state.is_given else 0,
        )
    first = max(seen, begin)
    return controller.accept(state.known[first:], rows[first - seen :])
