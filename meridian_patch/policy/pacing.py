"""Computes when the next answer token is due.

An answer that is ahead of its ITL target has slack: its next token is due only once the tokens made
so far have been read at the target's pace (as in Andes and Kairos).
"""

from collections.abc import Iterable
from typing import NamedTuple

# Upper bound of a step's duration in target latencies, however much slack the answers have.
MOST_TARGETS = 4.0


class Reading(NamedTuple):
    """One answer that is being read.

    Attributes:
        since_s: time of its first token.
        tokens: number of tokens so far.
        itl_s: its target for the inter-token latency, in seconds.
    """

    since_s: float
    tokens: int
    itl_s: float


def next_due_s(readings: Iterable[Reading], now_s: float) -> float | None:
    """Seconds until the first answer needs its next token; None without answers.

    At least the tightest target, and at most ``MOST_TARGETS`` times it.
    """
    due_s = tightest_s = float("inf")
    for since_s, tokens, itl_s in readings:
        due_s = min(due_s, since_s + tokens * itl_s)
        tightest_s = min(tightest_s, itl_s)
    if tightest_s == float("inf"):
        return None
    return min(max(due_s - now_s, tightest_s), MOST_TARGETS * tightest_s)
