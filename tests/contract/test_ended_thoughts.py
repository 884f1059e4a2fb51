"""Thoughts that ended are counted, and what their closes save is estimated."""

from meridian_patch.engine.early_exit.report import EndedThoughts
from meridian_patch.exit.actions import Close, Outcome
from meridian_patch.telemetry.counters import PhaseCounters

DUE = Close("eat", 290, 300, "figures")


def saved_after(*outcomes, mode="enforce"):
    counters = PhaseCounters()
    ends = EndedThoughts(counters)
    for outcome in outcomes:
        ends.ended(outcome, mode)
    return {name: n for name, n in counters.totals.items() if name.startswith("estimated_saved")}


def natural(tokens, verdict=None):
    return Outcome("natural", tokens, verdict, 0)


def test_a_verdict_that_was_not_carried_out_shows_what_it_would_have_saved():
    """Tokens between the due close and the thought's own end; nothing if that came first."""
    assert saved_after(natural(1000, DUE), mode="observe") == {"estimated_saved:observe": 700}
    assert saved_after(natural(299, DUE), mode="observe") == {"estimated_saved:observe": 0}
    assert saved_after(natural(1000), mode="observe") == {}
    unanswered = Outcome("unanswered", 1000, DUE, 0)
    assert saved_after(unanswered, mode="observe") == {"estimated_saved:observe": 700}


def test_a_close_that_was_given_up_saves_nothing():
    """In mode `enforce` a thought that went on after its verdict could not be closed."""
    assert saved_after(natural(1000, DUE)) == {}


def test_a_close_saves_what_longer_thoughts_went_on_for():
    """Of thoughts of 1 000 and of 400 tokens, one of 500 would have been of 1 000."""
    ended = [natural(tokens) for tokens in (1000, 400) * 16]
    closed = Outcome("eat", 500, DUE._replace(close_at=500), 0)
    totals = saved_after(*ended, closed)
    # Lengths are in bins of about a twelfth.
    assert 450 <= totals["estimated_saved:enforce"] <= 550


def test_there_is_no_estimate_from_few_thoughts_or_of_vllms_own_close():
    """Twenty thoughts that ended by themselves, first; neither budget nor max_tokens is an exit."""
    closed = Outcome("eat", 500, DUE, 0)
    assert saved_after(*[natural(1000)] * 19, closed) == {}
    budget = Outcome("budget", 500, None, 0)
    unanswered = Outcome("unanswered", 500, None, 0)
    assert saved_after(*[natural(1000)] * 32, budget, unanswered) == {}
    # Nor is a length that was cut one that a thought has by itself.
    assert saved_after(*[unanswered, budget] * 32, closed) == {}
