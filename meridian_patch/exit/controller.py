"""Decides for one request when its thinking is to be closed and when it is to be probed."""

import math
from collections.abc import Sequence

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.actions import NO_OBSTACLES, Action, Close, Obstacles, Outcome, Probe
from meridian_patch.exit.strategies.base import Row, own_end
from meridian_patch.exit.text_breaks import Breaks
from meridian_patch.exit.thought_monitor import ThoughtMonitor


class ExitController:
    """Watches one request's thoughts, one after the other.

    1. ``off``: nothing is asked for. ``observe``: probes are; verdicts are kept in the outcome.
       ``enforce``: closes are asked for too, one per thought.
    2. Behind a boundary nothing is asked for until a new thought starts, which is watched anew:
       floor, bounds and strategies are those of one thought.

    Tokens may be known late: what is due at a token is asked for when the token is known.

    Args:
        config: of the request.
        breaks: of the served vocabulary.
        budget_tokens: vLLM's ``thinking_token_budget``; None: none.
    """

    def __init__(
        self, config: ExitConfig, breaks: Breaks, budget_tokens: int | None = None
    ) -> None:
        self._config = config
        self._breaks = breaks
        self._budget_tokens = budget_tokens
        # None behind the boundary, and before the first start.
        self._watch: ThoughtMonitor | None = None
        self._num_thoughts = 0
        self._is_closing = False
        # How the last thought ended; None before the first did.
        self.outcome: Outcome | None = None

    @property
    def is_thinking(self) -> bool:
        """A thought is under way; never so in mode ``off``."""
        return self._watch is not None

    @property
    def quiet_tokens(self) -> float:
        """Think tokens that may come at once and nothing is due before the last; 0: unknown.

        Ends of lines and paragraphs are not among them, but for the first ``quiet_lines_tokens``
        and ``quiet_paragraphs_tokens``.
        """
        return 0 if self._watch is None else self._watch.quiet_tokens

    @property
    def quiet_lines_tokens(self) -> float:
        """As ``quiet_tokens``, ends of lines included."""
        return 0 if self._watch is None else self._watch.quiet_lines_tokens

    @property
    def quiet_paragraphs_tokens(self) -> float:
        """As ``quiet_tokens``, ends of paragraphs included."""
        return 0 if self._watch is None else self._watch.quiet_paragraphs_tokens

    @property
    def num_thoughts(self) -> int:
        """Thoughts so far, the one under way included: its number, from 1."""
        return self._num_thoughts

    @property
    def think_tokens(self) -> int:
        """Accepted tokens of the thought under way; 0 when there is none."""
        return self._watch.think_tokens if self._watch else 0

    @property
    def verdict(self) -> Close | None:
        """Of the thought under way: when it was to be closed; None: not yet."""
        return self._watch.verdict if self._watch else None

    @property
    def eat_variance(self) -> float:
        """EAT's debiased variance in the thought under way, in nats squared; else infinite."""
        return self._watch.eat_variance if self._watch else math.inf

    @property
    def too_soon(self) -> Obstacles:
        """Strategies that an end of the thought under way would come too soon for, and why."""
        return self._watch.too_soon() if self._watch else NO_OBSTACLES

    def start(self, think_tokens: int = 0) -> None:
        """A thought begins: the prompt's, or one behind a new start marker.

        Args:
            think_tokens: that it has already, in the prompt; they were not measured.
        """
        if self._config.mode == "off":
            return
        self._num_thoughts += 1
        self._is_closing = False
        self._watch = ThoughtMonitor(
            self._num_thoughts, self._config, self._breaks, self._budget_tokens, think_tokens
        )

    def accept(self, token_ids: Sequence[int], rows: Sequence[Row]) -> Action | None:
        """Take in think tokens that were accepted; of a step that ends the thought see ``end``.

        Args:
            token_ids: in order, of one step or several.
            rows: their signals, one row per token.

        Returns:
            What is to be done now; None for nothing.
        """
        if self._watch is None:
            return None
        action = self._watch.accept(token_ids, rows)
        return None if action is None else self._permitted(action)

    def probed(self, probe: Probe, entropy_nats: float) -> Action | None:
        """Take in a probe's result; one of another thought, or older than the last, is dropped."""
        if self._watch is None:
            return None
        action = self._watch.probed(probe, entropy_nats)
        return None if action is None else self._permitted(action)

    def closing(self) -> None:
        """The close is being forced: what ends the thought now is no longer its own end."""
        self._is_closing = True

    def end(self, num_tokens: int) -> Outcome | None:
        """The boundary was accepted; None when no thought was under way.

        Args:
            num_tokens: think tokens that came with it, its own included, and did not go through
                ``accept``.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        think_tokens = watch.think_tokens + num_tokens
        if self._is_closing and watch.verdict:
            reason = watch.verdict.reason
        else:
            reason = own_end(think_tokens, self._budget_tokens)
        self.outcome = Outcome(
            reason,
            think_tokens,
            watch.verdict,
            watch.num_invalid,
            too_soon=NO_OBSTACLES if watch.verdict else watch.too_soon(),
        )
        return self.outcome

    def _permitted(self, action: Action) -> Action | None:
        is_kept = action.close is not None and self._config.mode != "enforce"
        return None if is_kept else action
