"""Builds the summary of a request's thinking for its caller."""

from typing import Any

from meridian_patch.exit.actions import ExitReport

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
