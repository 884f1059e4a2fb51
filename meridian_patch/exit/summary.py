"""How a request's thinking ended, as its caller is told."""

from typing import Any

from meridian_patch.exit.actions import Outcome

Summary = dict[str, Any]
"""Plain values only: it crosses processes, and stands in HTTP responses.

* ``exit_reason``: what ended the last thought;
* ``think_tokens``: accepted tokens of all thoughts, the boundaries' included;
* ``would_exit``: only where the last thought ended otherwise than it was to be closed, as in mode
  ``observe``: ``exit_reason`` and ``think_tokens`` of the close that was due;
* ``measured``: only where the last thought was not, and then False: whether it was to be closed is
  not known.
"""


def summarize(last: Outcome, think_tokens: int) -> Summary:
    """One request's thinking so far.

    Args:
        last: how its last thought ended.
        think_tokens: of all its thoughts that ended, this one included.
    """
    summary: Summary = {"exit_reason": str(last.reason), "think_tokens": think_tokens}
    due = last.verdict
    if due is not None and due.reason != last.reason:
        summary["would_exit"] = {
            "exit_reason": str(due.reason),
            "think_tokens": think_tokens - last.think_tokens + due.close_at,
        }
    if not last.is_measured:
        summary["measured"] = False
    return summary
