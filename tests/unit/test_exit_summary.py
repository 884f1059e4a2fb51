"""What a caller is told of how thinking ended."""

import json
import re
from pathlib import Path

from meridian_patch.exit.actions import Close, ExitReport, Obstacle, Outcome, summarize


def outcome(reason: str, tokens: int, verdict: Close | None = None) -> Outcome:
    return Outcome(reason, tokens, verdict, 0)


def close(reason: str, at: int) -> Close:
    return Close(reason, at - 4, at, "figures")


def test_one_thought():
    """Reason and tokens, as plain values that survive any serializer."""
    summary = summarize(ExitReport(outcome("natural", 57), 57))
    assert summary == {"exit_reason": "natural", "think_tokens": 57}
    assert type(summary["exit_reason"]) is str
    assert json.loads(json.dumps(summary)) == summary


def test_several_thoughts_are_told_as_the_last_and_the_sum():
    """Of several thoughts the last one's reason counts, and every one's tokens."""
    assert summarize(ExitReport(outcome("natural", 9), 49)) == {
        "exit_reason": "natural",
        "think_tokens": 49,
    }


def test_a_close_that_was_carried_out_is_told_once():
    """Enforced, the verdict is the reason."""
    told = summarize(ExitReport(outcome("rpdi", 900, close("rpdi", 896)), 900))
    assert told == {"exit_reason": "rpdi", "think_tokens": 900}


def test_a_close_that_was_only_observed_is_told_beside_what_happened():
    """Its tokens count from the first thought on, as those of the request do."""
    assert summarize(ExitReport(outcome("natural", 80, close("eat", 30)), 180)) == {
        "exit_reason": "natural",
        "think_tokens": 180,
        "would_exit": {"exit_reason": "eat", "think_tokens": 130},
    }


def test_what_could_not_be_enforced_is_told():
    """By strategy, in plain words; before a thought has ended it is all there is to say."""
    obstacles = {"eat": Obstacle.WARM_UP, "rpdi": Obstacle.GRAMMAR}
    words = {"eat": "warm_up", "rpdi": "grammar"}
    assert summarize(ExitReport(None, 0, obstacles)) == {"not_enforced": words}
    summary = summarize(ExitReport(outcome("natural", 9), 9, obstacles))
    assert summary == {"exit_reason": "natural", "think_tokens": 9, "not_enforced": words}
    assert json.loads(json.dumps(summary)) == summary


def test_every_word_is_explained():
    """Each obstacle has a row in the page on requests, and the page knows no other."""
    page = (Path(__file__).parents[2] / "docs" / "requests.md").read_text()
    table = page.partition("## What could not be enforced")[2].partition("\n\nThe first six")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(Obstacle)


def test_forced_tokens_are_a_plain_list():
    """As in JSON, and as attributes of spans may be."""
    summary = summarize(ExitReport(outcome("eat", 9), 9, forced=(8, 30, 31)))
    assert summary["forced_tokens"] == [8, 30, 31]
