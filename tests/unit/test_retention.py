"""What becomes of a request's blocks when they are freed."""

from dataclasses import replace

import pytest

from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import BoundaryMatcher
from meridian_patch.phase.tracker import Phase, RequestPhase
from meridian_patch.policy.retention import (
    Retention,
    Tier,
    choose_history,
    retain_finished,
    retain_preempted,
    retain_skipped,
)

FIRST = 40
KEPT_HISTORIES = ["keep", "unverified"]
STRIPPED_HISTORIES = ["strip", "keep_in_tool_loop"]
START, END = 1, 2
# It answers, and its prompt holds a thought of an earlier turn.
EARLIER = RequestPhase(
    (*[0] * FIRST, START, *[0] * 59),
    Phase.ANSWER,
    Phase.ANSWER,
    0,
    tokens_before=100,
    given_tokens=100,
    matcher=BoundaryMatcher(Boundaries("test", ((START,),), ((END,),), (END,))),
)


def request_in(phase, first_thought=FIRST):
    return RequestPhase((), phase, phase, 0, 100, own_thought=first_thought)


def test_lower_tiers_are_evicted_first():
    """A finished thought goes first, then a preempted one, then what can be hit again."""
    assert sorted(Tier, reverse=True) == [
        Tier.OUTPUT_CRITICAL,
        Tier.THINK_ACTIVE,
        Tier.THINK_COMPLETE,
    ]
    assert [tier.label for tier in Tier] == ["think_complete", "think_active", "output_critical"]


@pytest.mark.parametrize("history", ["strip", "keep", "keep_in_tool_loop", "unverified"])
@pytest.mark.parametrize("phase", list(Phase))
def test_without_a_thought_everything_stays_where_stock_puts_it(phase, history):
    """A request that never thought is no business of ours, however it ends."""
    state = request_in(phase, first_thought=None)
    assert retain_finished(state, history, has_tool_call=False) is None
    assert retain_finished(state, history, has_tool_call=True) is None
    assert retain_preempted(state, history) is None
    assert retain_skipped(state, history) is None


@pytest.mark.parametrize("history", KEPT_HISTORIES)
@pytest.mark.parametrize("phase", list(Phase))
def test_a_kept_or_unknown_history_is_stock(phase, history):
    """Where everything comes back, or it is unknown, nothing is evicted early."""
    state = request_in(phase)
    assert retain_finished(state, history, has_tool_call=False) is None
    assert retain_preempted(state, history) is None
    assert retain_skipped(state, history) is None


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("first_thought", [0, FIRST])
def test_a_finished_thought_goes_first_and_the_answer_behind_it_too(phase, first_thought):
    """Only what stands before the first thought comes back, also when that is nothing."""
    state = request_in(phase, first_thought)
    expected = Retention(first_thought, Tier.THINK_COMPLETE)
    assert retain_finished(state, "strip", has_tool_call=False) == expected
    assert retain_finished(state, "keep_in_tool_loop", has_tool_call=False) == expected


def test_earlier_thoughts_in_the_prompt_go_only_with_their_tool_loop():
    """Under `strip` a thought in a prompt is some text that came back and will again."""
    state = replace(EARLIER, own_thought=70)
    assert retain_finished(state, "strip", has_tool_call=False).kept_tokens == 70
    assert retain_finished(state, "keep_in_tool_loop", has_tool_call=False).kept_tokens == FIRST
    assert retain_finished(EARLIER, "strip", has_tool_call=False) is None


def test_a_tool_loop_that_goes_on_comes_back_where_the_template_keeps_it():
    """A tool call keeps the thought under keep_in_tool_loop, and only there."""
    state = request_in(Phase.ANSWER)
    kept = Retention(FIRST, Tier.OUTPUT_CRITICAL)
    assert retain_finished(state, "keep_in_tool_loop", has_tool_call=True) == kept
    gone = Retention(FIRST, Tier.THINK_COMPLETE)
    assert retain_finished(state, "strip", has_tool_call=True) == gone


@pytest.mark.parametrize("history", STRIPPED_HISTORIES)
def test_a_preempted_thinker_gives_way_before_prompts_and_an_answer_does_not(history):
    """Its resume hits what is left; an answer keeps all of it."""
    assert retain_preempted(request_in(Phase.THINK), history) == (FIRST, Tier.THINK_ACTIVE)
    assert retain_preempted(request_in(Phase.ANSWER), history) == (FIRST, Tier.OUTPUT_CRITICAL)
    # Preempted amid its first prefill: nothing behind the marker is computed yet.
    assert retain_preempted(request_in(Phase.PREFILL), history) == (FIRST, Tier.OUTPUT_CRITICAL)


def test_skipped_blocks_behind_the_thought_are_never_needed_again():
    """Not even a resume attends to them; a tool loop that may go on does."""
    assert retain_skipped(request_in(Phase.THINK), "strip") == (FIRST, Tier.THINK_COMPLETE)
    assert retain_skipped(request_in(Phase.ANSWER), "strip") == (FIRST, Tier.THINK_COMPLETE)
    assert retain_skipped(request_in(Phase.ANSWER), "keep_in_tool_loop") is None


@pytest.mark.parametrize("known", ["strip", "keep", "unverified"])
@pytest.mark.parametrize("sees_tool_calls", [False, True])
def test_auto_history_is_the_familys(known, sees_tool_calls):
    """Without a configured rule the family's counts."""
    assert choose_history(known, "auto", sees_tool_calls=sees_tool_calls) == known


@pytest.mark.parametrize("known", ["strip", "keep", "keep_in_tool_loop", "unverified"])
@pytest.mark.parametrize("configured", ["strip", "keep"])
def test_a_configured_history_counts(known, configured):
    """What the operator says overrides the family."""
    assert choose_history(known, configured, sees_tool_calls=False) == configured
    assert choose_history(known, configured, sees_tool_calls=True) == configured


@pytest.mark.parametrize(
    ("known", "configured"), [("keep_in_tool_loop", "auto"), ("strip", "keep_in_tool_loop")]
)
def test_a_tool_loop_rule_needs_to_see_tool_calls(known, configured):
    """Without a marker a running tool loop looks finished, so everything is kept."""
    assert choose_history(known, configured, sees_tool_calls=True) == "keep_in_tool_loop"
    assert choose_history(known, configured, sees_tool_calls=False) == "keep"
