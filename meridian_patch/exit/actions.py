"""The decisions on thoughts, what stands against a close, and the reports to callers."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple


class Obstacle(StrEnum):
    """One reason; callers and metrics see its value.

    The first nine apply to the whole engine and disable strategies. The next nine apply to a
    close: something applied after the plug-in's masks would undo it, or no answer would follow it.
    The last three apply to one thought.
    """

    NO_BOUNDARY = "no_boundary"
    EXTERNAL_LAUNCHER = "external_launcher"
    STOPPED = "stopped"
    NO_SIGNALS = "no_signals"
    PROBE_TEXT = "probe_text"
    NO_PREFIX_CACHE = "no_prefix_cache"
    KV_GROUPS = "kv_groups"
    KV_CONNECTOR = "kv_connector"
    STEP_TOKENS = "step_tokens"

    GRAMMAR = "grammar"
    ALLOWED_TOKENS = "allowed_tokens"
    BAD_WORDS = "bad_words"
    LOGIT_BIAS = "logit_bias"
    MIN_TOKENS = "min_tokens"
    LOGITS_PROCESSORS = "logits_processors"
    TRACE_REPLAY = "trace_replay"
    BUDGET = "budget"
    NO_ROOM = "no_room"

    FLOOR = "floor"
    WARM_UP = "warm_up"
    NOT_PROBED = "not_probed"


TO_CLOSES: Final = (
    Obstacle.GRAMMAR,
    Obstacle.ALLOWED_TOKENS,
    Obstacle.BAD_WORDS,
    Obstacle.LOGIT_BIAS,
    Obstacle.MIN_TOKENS,
    Obstacle.LOGITS_PROCESSORS,
    Obstacle.TRACE_REPLAY,
    Obstacle.BUDGET,
    Obstacle.NO_ROOM,
)
"""Obstacles that are found when a close is due."""

PASSING: Final = (Obstacle.GRAMMAR, Obstacle.MIN_TOKENS)
"""Obstacles to a close that may be gone at a later token of the same thought."""

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


Summary = dict[str, Any]
"""Has plain values only, because it is sent between processes and in HTTP responses.

* ``exit_reason``: what ended the last thought;
* ``think_tokens``: accepted tokens of all thoughts, including boundaries;
* ``would_exit``: only if the last thought was due to be closed but ended for another reason, as in
  mode ``observe``: ``exit_reason`` and ``think_tokens`` of the close that was due;
* ``measured``: False if the last thought was not measured, so that it is not known whether it was
  due to be closed; otherwise missing;
* ``forced_tokens``: only if thoughts were closed: indices in the output of the tokens that closes
  forced. They were the only ones that could be sampled, so their log-probabilities are 0;
* ``not_enforced``: only in mode ``enforce`` if strategies could not close: each with its
  ``Obstacle``. It is the only key if no thought has ended.
"""


def summarize(report: ExitReport) -> Summary:
    """The summary of one request's report."""
    summary: Summary = {}
    last = report.outcome
    if last is not None:
        summary |= {"exit_reason": str(last.reason), "think_tokens": report.think_tokens}
        due = last.verdict
        if due is not None and due.reason != last.reason:
            summary["would_exit"] = {
                "exit_reason": str(due.reason),
                "think_tokens": report.think_tokens - last.think_tokens + due.close_at,
            }
        if not last.is_measured:
            summary["measured"] = False
    if report.forced:
        summary["forced_tokens"] = list(report.forced)
    if report.not_enforced:
        summary["not_enforced"] = {
            str(strategy): str(why) for strategy, why in report.not_enforced.items()
        }
    return summary
