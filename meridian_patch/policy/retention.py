"""Decides in which tier a freed KV block is kept.

A block can be hit again only by a prompt that contains the block's tokens and all tokens before
them as a prefix. Most chat templates drop the thinking of earlier turns. The blocks from the first
thought of a finished request on are then never hit again: neither those of the thought nor those of
the answer, whose positions change.
"""

from enum import IntEnum
from typing import NamedTuple, cast

from meridian_patch.config.family_schema import History
from meridian_patch.phase.tracker import Phase, RequestPhase


class Tier(IntEnum):
    """Class of a free cached block; lower tiers are evicted first."""

    THINK_COMPLETE = 0
    THINK_ACTIVE = 1
    OUTPUT_CRITICAL = 2

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name.lower()


class Retention(NamedTuple):
    """The tiers of a request's blocks when they are freed.

    Attributes:
        kept_tokens: blocks that end at or before this many tokens are ``OUTPUT_CRITICAL``.
        tier: tier of the blocks that end later.
    """

    kept_tokens: int
    tier: Tier


def choose_history(known: History, configured: str, *, sees_tool_calls: bool) -> History:
    """The history rule to use.

    Args:
        known: the rule of the model's family.
        configured: ``kv.history``; ``auto`` means ``known``.
        sees_tool_calls: False if the family has no tool-call marker. It is then unknown whether a
            tool loop continues, so everything is kept, as in stock.
    """
    rule = known if configured == "auto" else cast("History", configured)
    if rule == "keep_in_tool_loop" and not sees_tool_calls:
        return "keep"
    return rule


def kept_tokens(state: RequestPhase, history: History) -> int | None:
    """How many of a request's first tokens a later turn's prompt may begin with.

    1. ``strip``: the tokens before this request's own thought. Earlier markers are part of text
       that the template repeats in each prompt.
    2. ``keep_in_tool_loop``: the tokens before the first thought in the prompt, because the
       thoughts of the tool loop's earlier requests are dropped when it ends.

    Returns:
        None for all tokens: the history is kept or unknown, or there is no thought.
    """
    if history == "strip":
        return state.own_thought
    return state.first_thought if history == "keep_in_tool_loop" else None


def retain_finished(
    state: RequestPhase, history: History, *, has_tool_call: bool
) -> Retention | None:
    """Retention of a finished or aborted request; None leaves all blocks where stock puts them.

    While a tool loop continues, the next prompt contains everything.
    """
    kept = kept_tokens(state, history)
    if kept is None:
        return None
    goes_on = history == "keep_in_tool_loop" and has_tool_call
    return Retention(kept, Tier.OUTPUT_CRITICAL if goes_on else Tier.THINK_COMPLETE)


def retain_preempted(state: RequestPhase, history: History) -> Retention | None:
    """Retention of a preempted request, which hits the blocks that are left when it resumes.

    Blocks of a thinker are evicted before those of prompts; blocks of an answer are not.
    """
    kept = kept_tokens(state, history)
    if kept is None:
        return None
    is_thinking = state.phase is Phase.THINK
    return Retention(kept, Tier.THINK_ACTIVE if is_thinking else Tier.OUTPUT_CRITICAL)


def retain_skipped(state: RequestPhase, history: History) -> Retention | None:
    """Retention of blocks that a running request no longer attends to (sliding window).

    They are evicted first, because the request does not need them even after a preemption.
    """
    kept = kept_tokens(state, history) if history == "strip" else None
    return None if kept is None else Retention(kept, Tier.THINK_COMPLETE)
