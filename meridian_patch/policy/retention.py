"""How long a free KV block is kept: decides, never acts.

A block can be hit again only by a prompt that begins with the block's tokens and all before them.
Most chat templates drop earlier turns' thinking, so nothing behind the first thought of a finished
request comes back: neither the thought nor the answer, whose positions change.
"""

from enum import IntEnum
from typing import NamedTuple, cast

from meridian_patch.config.family import History
from meridian_patch.phase.tracker import Phase, RequestPhase


class Tier(IntEnum):
    """Class of a free cached block; lower tiers are evicted first."""

    THINK_COMPLETE = 0
    THINK_ACTIVE = 1
    OUTPUT_CRITICAL = 2

    @property
    def label(self) -> str:
        """In metrics."""
        return self.name.lower()


class Retention(NamedTuple):
    """What becomes of a request's blocks when they are freed.

    Attributes:
        kept_tokens: blocks that end at or before this many tokens are ``OUTPUT_CRITICAL``.
        tier: of the blocks that end behind.
    """

    kept_tokens: int
    tier: Tier


def choose_history(known: History, configured: str, *, sees_tool_calls: bool) -> History:
    """The history rule to go by.

    Args:
        known: of the model's family.
        configured: ``kv.history``; ``auto`` is ``known``.
        sees_tool_calls: False when the family has no tool-call marker. A tool loop that goes on
            cannot be told from its end then, and everything is kept, as stock does.
    """
    rule = known if configured == "auto" else cast("History", configured)
    if rule == "keep_in_tool_loop" and not sees_tool_calls:
        return "keep"
    return rule


def kept_tokens(state: RequestPhase, history: History) -> int | None:
    """How many of a request's tokens, from the first on, a later turn's prompt may begin with.

    1. Where earlier thinking is dropped, what stands before this request's own thought. Markers
       before are part of some text that came back before and will again.
    2. In a tool loop the thoughts of its earlier requests go too once it ends.

    Returns:
        None for all of them: the history is kept, not known, or there is no thought.
    """
    if history == "strip":
        return state.own_thought
    return state.first_thought if history == "keep_in_tool_loop" else None


def retain_finished(
    state: RequestPhase, history: History, *, has_tool_call: bool
) -> Retention | None:
    """Retention of a finished or aborted request; None leaves all blocks where stock puts them.

    A tool loop that goes on brings everything back.
    """
    kept = kept_tokens(state, history)
    if kept is None:
        return None
    goes_on = history == "keep_in_tool_loop" and has_tool_call
    return Retention(kept, Tier.OUTPUT_CRITICAL if goes_on else Tier.THINK_COMPLETE)


def retain_preempted(state: RequestPhase, history: History) -> Retention | None:
    """Retention of a preempted request; its resume hits what is still there.

    A thinker gives way before prompts do; an answer that somebody reads does not.
    """
    kept = kept_tokens(state, history)
    if kept is None:
        return None
    is_thinking = state.phase is Phase.THINK
    return Retention(kept, Tier.THINK_ACTIVE if is_thinking else Tier.OUTPUT_CRITICAL)


def retain_skipped(state: RequestPhase, history: History) -> Retention | None:
    """Retention of blocks that a running request no longer attends to (sliding window).

    Not even its own resume needs them.
    """
    kept = kept_tokens(state, history) if history == "strip" else None
    return None if kept is None else Retention(kept, Tier.THINK_COMPLETE)
