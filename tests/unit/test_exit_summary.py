"""What a caller is told of how thinking ended."""

import json

from meridian_patch.exit.actions import Close, Outcome
from meridian_patch.exit.base import Reason
from meridian_patch.exit.summary import summarize


def outcome(reason: Reason, tokens: int, verdict: Close | None = None) -> Outcome:
    return Outcome(reason, tokens, verdict, 0)


def close(reason: Reason, at: int) -> Close:
    return Close(reason, at - 4, at, "figures")


def test_one_thought():
    """Reason and tokens, as plain values that survive any serializer."""
    summary = summarize(outcome(Reason.NATURAL, 57), 57)
    assert summary == {"exit_reason": "natural", "think_tokens": 57}
    assert type(summary["exit_reason"]) is str
    assert json.loads(json.dumps(summary)) == summary


def test_several_thoughts_are_told_as_the_last_and_the_sum():
    """Of several thoughts the last one's reason counts, and every one's tokens."""
    assert summarize(outcome(Reason.NATURAL, 9), 49) == {
        "exit_reason": "natural",
        "think_tokens": 49,
    }


def test_a_close_that_was_carried_out_is_told_once():
    """Enforced, the verdict is the reason."""
    told = summarize(outcome(Reason.RPDI, 900, close(Reason.RPDI, 896)), 900)
    assert told == {"exit_reason": "rpdi", "think_tokens": 900}


def test_a_close_that_was_only_observed_is_told_beside_what_happened():
    """Its tokens count from the first thought on, as those of the request do."""
    assert summarize(outcome(Reason.NATURAL, 80, close(Reason.EAT, 30)), 180) == {
        "exit_reason": "natural",
        "think_tokens": 180,
        "would_exit": {"exit_reason": "eat", "think_tokens": 130},
    }
