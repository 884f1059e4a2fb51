"""How a request's thinking ended, as its caller is told."""

from typing import Any

from meridian_patch.exit.actions import ExitReport

Summary = dict[str, Any]
"""Plain values only: it crosses processes, and stands in HTTP responses.

* ``exit_reason``: what ended the last thought;
* ``think_tokens``: accepted tokens of all thoughts, the boundaries' included;
* ``would_exit``: only where the last thought ended otherwise than it was to be closed, as in mode
  ``observe``: ``exit_reason`` and ``think_tokens`` of the close that was due;
* ``measured``: only where the last thought was not, and then False: whether it was to be closed is
  not known;
* ``not_enforced``: only where the request asked for thoughts to be closed and a strategy could not:
  strategies, and the ``Obstacle`` of each. The only key where no thought has ended.
"""


def summarize(told: ExitReport) -> Summary:
    """One request's thinking so far."""
    summary: Summary = {}
    last = told.outcome
    if last is not None:
        summary |= {"exit_reason": str(last.reason), "think_tokens": told.think_tokens}
        due = last.verdict
        if due is not None and due.reason != last.reason:
            summary["would_exit"] = {
                "exit_reason": str(due.reason),
                "think_tokens": told.think_tokens - last.think_tokens + due.close_at,
            }
        if not last.is_measured:
            summary["measured"] = False
    if told.not_enforced:
        summary["not_enforced"] = {
            str(strategy): str(why) for strategy, why in told.not_enforced.items()
        }
    return summary
