"""When the next token of the tightest answer is due.

An answer that streams faster than its reader needs has tokens in hand. Its next token is due only
when they are read (slack, as in Andes and Kairos).
"""

from collections.abc import Iterable
from typing import NamedTuple

# However far ahead all answers are, a step takes no more than this many target latencies.
MOST_TARGETS = 4.0


class Reading(NamedTuple):
    """One answer that is being read.

    Attributes:
        since_s: when its first token was made.
        tokens: made so far.
        itl_s: the inter-token latency that it is to keep.
    """

    since_s: float
    tokens: int
    itl_s: float


def next_due_s(readings: Iterable[Reading], now_s: float) -> float | None:
    """Seconds until the first reader waits for a token; None when nobody reads.

    At least the tightest target, and at most ``MOST_TARGETS`` of it.
    """
    due_s = tightest_s = float("inf")
    for since_s, tokens, itl_s in readings:
        due_s = min(due_s, since_s + tokens * itl_s)
        tightest_s = min(tightest_s, itl_s)
    if tightest_s == float("inf"):
        return None
    return min(max(due_s - now_s, tightest_s), MOST_TARGETS * tightest_s)
