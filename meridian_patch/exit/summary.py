"""How a request's thinking ended, as its caller is told."""

from collections.abc import Sequence
from typing import Any

from meridian_patch.exit.actions import Outcome

Summary = dict[str, Any]
"""Plain values only: it crosses processes, and stands in HTTP responses.

* ``exit_reason``: what ended the last thought;
* ``think_tokens``: accepted tokens of all thoughts, the boundaries' included;
* ``would_exit``: only where the last thought ended otherwise than it was to be closed, as in mode
  ``observe``: ``exit_reason`` and ``think_tokens`` of the close that was due.
"""


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """One request's thoughts, in order; there is at least one."""
    last = outcomes[-1]
    summary: Summary = {
        "exit_reason": str(last.reason),
        "think_tokens": sum(outcome.think_tokens for outcome in outcomes),
    }
    due = last.verdict
    if due is not None and due.reason != last.reason:
        before = sum(outcome.think_tokens for outcome in outcomes[:-1])
        summary["would_exit"] = {
            "exit_reason": str(due.reason),
            "think_tokens": before + due.close_at,
        }
    return summary
