"""The types of the exit controller's decisions and reports."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from meridian_patch.exit.obstacles import Obstacle

Obstacles = Mapping[str, Obstacle]
"""Strategies, by their reasons, that cannot close a thought, and why."""

NO_OBSTACLES: Final[Obstacles] = MappingProxyType({})


class Close(NamedTuple):
    """The decision to close a thought now.

    Attributes:
        reason: the strategy that fired first.
        fired_at: think tokens when it fired.
        close_at: think tokens at which the close was due: the end of a line, or of the grace.
        why: the measured values and thresholds, as text.
    """

    reason: str
    fired_at: int
    close_at: int
    why: str


class Probe(NamedTuple):
    """The decision to probe a thought.

    Attributes:
        thought: number of the thought in the request, from 1.
        think_tokens: number of its tokens before the trial boundary.
    """

    thought: int
    think_tokens: int


class Action(NamedTuple):
    """What to do now: a close or a probe, never both."""

    close: Close | None = None
    probe: Probe | None = None


class Outcome(NamedTuple):
    """How a thought ended.

    Attributes:
        reason: what ended it.
        think_tokens: its accepted tokens, including the boundary's.
        verdict: the decision to close it, in mode ``observe`` too; None: there was none.
        num_invalid: number of signals of tokens and probes that were not finite.
        is_measured: False if only its end is known.
        too_soon: strategies that could not fire before the thought ended; empty with a verdict.
    """

    reason: str
    think_tokens: int
    verdict: Close | None
    num_invalid: int
    is_measured: bool = True
    too_soon: Obstacles = NO_OBSTACLES


class ExitReport(NamedTuple):
    """The report to a request's caller on its thinking so far.

    Attributes:
        outcome: how its last thought ended; None: none has ended.
        think_tokens: sum over all its thoughts that ended.
        not_enforced: in mode ``enforce``, the strategies that could not close, and why.
        forced: indices in the output of the tokens that closes forced.
    """

    outcome: Outcome | None
    think_tokens: int
    not_enforced: Obstacles = NO_OBSTACLES
    forced: tuple[int, ...] = ()
