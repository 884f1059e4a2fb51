"""What the controller asks for and reports."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from meridian_patch.exit.obstacles import Obstacle
from meridian_patch.exit.strategies.base import Reason

Obstacles = Mapping[Reason, Obstacle]
"""Strategies that could not close a thought, and why."""

NO_OBSTACLES: Final[Obstacles] = MappingProxyType({})


class Close(NamedTuple):
    """A thought should be closed now.

    Attributes:
        reason: of the strategy that fired first.
        fired_at: think tokens when it fired.
        close_at: think tokens at which the close was due: a line's end, or the end of the grace.
        why: the figures behind it, for people.
    """

    reason: Reason
    fired_at: int
    close_at: int
    why: str


class Probe(NamedTuple):
    """A thought should be probed.

    Attributes:
        thought: which thought of the request, from 1.
        think_tokens: its tokens that stand before the trial boundary.
    """

    thought: int
    think_tokens: int


class Action(NamedTuple):
    """What is to be done now; never both."""

    close: Close | None = None
    probe: Probe | None = None


class Outcome(NamedTuple):
    """How a thought ended.

    Attributes:
        reason: what ended it.
        think_tokens: its accepted tokens, the boundary's included.
        verdict: when it was to be closed, or would have been in mode ``observe``; None: never.
        num_invalid: signals, of tokens and probes, that were no finite numbers.
        is_measured: False where only the end was seen.
        too_soon: strategies that the thought's end came too soon for; none where a verdict is.
    """

    reason: Reason
    think_tokens: int
    verdict: Close | None
    num_invalid: int
    is_measured: bool = True
    too_soon: Obstacles = NO_OBSTACLES


class ExitReport(NamedTuple):
    """What a request's caller is told of its thinking so far.

    Attributes:
        outcome: how its last thought ended; None: none has ended.
        think_tokens: of all its thoughts that ended.
        not_enforced: where closing was asked for: strategies that could not, and why.
    """

    outcome: Outcome | None
    think_tokens: int
    not_enforced: Obstacles = NO_OBSTACLES
