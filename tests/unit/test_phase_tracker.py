"""The per-request phase state machine."""

from dataclasses import replace

import pytest
from spoken import SpokenTracker

from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.tracker import Phase

START, END, WORD = 1, 2, 9
SIMPLE = Boundaries("test", ((START,),), ((END,),), (END,))
LONG = Boundaries("test", ((5, 6, 7),), ((8, 8, 3),), (8, 8, 3))


def phase(tracker, request_id="r"):
    state = tracker.get(request_id)
    return state.phase if state else None


def test_prompt_that_opened_thinking():
    """The first token of a request whose prompt ends in an open thought is thinking."""
    tracker = SpokenTracker(SIMPLE)
    tracker.add("r", [WORD, START, WORD])
    assert phase(tracker) is Phase.PREFILL
    assert tracker.say("r", [WORD])
    assert phase(tracker) is Phase.THINK


def test_what_a_prompt_has_of_its_thought():
    """Behind the start marker, of one token or of several; nothing of a thought that is over."""
    for boundaries, prompt, given in (
        (SIMPLE, [WORD, START], 0),
        (SIMPLE, [START, WORD, END, START, WORD, WORD], 2),
        (SIMPLE, [START, WORD, END], 0),
        (SIMPLE, [WORD], 0),
        (LONG, [WORD, 5, 6, 7, WORD], 1),
    ):
        tracker = SpokenTracker(boundaries)
        tracker.add("r", prompt)
        state = tracker.get("r")
        assert state.given_think_tokens == given
        tracker.say("r", [WORD])
        assert (state.given_think_tokens, state.is_given) == (given, True)
    tracker.say("r", list(LONG.end[0]))
    assert not state.is_given


def test_prompt_that_closed_thinking():
    """Disabled thinking leaves a closed thought in the prompt: the request answers."""
    tracker = SpokenTracker(SIMPLE)
    tracker.add("r", [START, END])
    tracker.say("r", [WORD])
    assert phase(tracker) is Phase.ANSWER
    assert tracker.num_reasoning == 0


def test_prompt_without_boundaries_answers_until_the_model_opens_a_thought():
    """A model that opens its thought itself is thinking from that token on."""
    tracker = SpokenTracker(SIMPLE)
    tracker.add("r", [WORD])
    tracker.say("r", [START])
    assert phase(tracker) is Phase.THINK
    assert tracker.num_reasoning == 1


def test_boundary_and_reentry():
    """An end marker hands off to the answer and a new start marker takes it back."""
    tracker = SpokenTracker(SIMPLE)
    tracker.add("r", [START])
    assert tracker.say("r", [WORD])
    assert not tracker.say("r", [WORD])
    assert tracker.say("r", [END])
    state = tracker.get("r")
    assert (state.phase, state.think_tokens, state.is_handed_off) == (Phase.ANSWER, 3, True)
    assert not tracker.say("r", [WORD])
    assert tracker.say("r", [START])
    assert phase(tracker) is Phase.THINK
    assert tracker.num_reasoning == 1


@pytest.mark.parametrize("prompt", [[START], [START, END]], ids=["output", "prompt"])
def test_a_start_marker_in_an_answer_is_text_where_the_parser_says_so(prompt):
    """The user asked what it means; a cap would force an end marker into the answer."""
    tracker = SpokenTracker(replace(SIMPLE, reopens=False, turn_start=frozenset({7})))
    tracker.add("r", [7, *prompt])
    tracker.say("r", [WORD, *([END, WORD] if prompt == [START] else []), START, WORD])
    assert phase(tracker) is Phase.ANSWER
    assert not tracker.resync("r")
    # A thought that the model opens itself is its first.
    tracker.add("own", [WORD])
    tracker.say("own", [WORD, START])
    assert phase(tracker, "own") is Phase.THINK


def test_an_end_in_a_prompt_without_turns_may_be_an_earlier_ones():
    """The model opens its own thought behind a history that holds one."""
    tracker = SpokenTracker(replace(SIMPLE, reopens=False))
    tracker.add("r", [START, WORD, END, WORD])
    tracker.say("r", [START, WORD])
    assert phase(tracker) is Phase.THINK


@pytest.mark.parametrize("unseen", [[END, WORD, START, WORD], [START, END, START, WORD]])
def test_a_resync_ends_with_the_first_end_where_no_thought_is_opened_again(unseen):
    """A start marker behind it is text."""
    tracker = SpokenTracker(replace(SIMPLE, reopens=False))
    tracker.add("r", [START if unseen[0] == END else WORD])
    tracker.say("r", [WORD])
    tracker.get("r").known.extend(unseen)
    tracker.resync("r")
    tracker.say("r", [WORD, START, WORD])
    assert phase(tracker) is Phase.ANSWER


def test_a_tool_call_ends_a_thought():
    """The answer begins with the call's marker, which is no token of the thought."""
    calling = Boundaries("test", ((START,),), ((END,), (5, 6)), (END,), implicit_end=((5, 6),))
    tracker = SpokenTracker(calling)
    tracker.add("r", [START])
    tracker.say("r", [WORD, WORD, 5])
    assert phase(tracker) is Phase.THINK
    assert tracker.say("r", [6])
    state = tracker.get("r")
    assert (state.phase, state.tokens_in_phase, state.think_tokens) == (Phase.ANSWER, 2, 2)
    assert (state.is_handed_off, state.is_calling, state.marker_tokens) == (True, True, 0)


def test_a_marker_in_the_arguments_of_a_tool_call_opens_no_thought():
    """A cap would close it within them. Before the call the model may think again."""
    calling = Boundaries("test", ((START,),), ((END,), (5,)), (END,), implicit_end=((5,),))
    tracker = SpokenTracker(calling)
    tracker.add("r", [START])
    tracker.say("r", [WORD, END, START])
    assert phase(tracker) is Phase.THINK
    tracker.say("r", [END, 5, WORD, START, WORD])
    assert phase(tracker) is Phase.ANSWER
    assert not tracker.resync("r")


def test_a_marker_in_an_earlier_turn_opens_nothing():
    """The user asks what the start marker means, and the assistant's turn begins plain."""
    tracker = SpokenTracker(replace(SIMPLE, turn_start=frozenset({7})))
    tracker.add("r", [7, WORD, START, WORD, 7, WORD])
    tracker.say("r", [WORD])
    assert phase(tracker) is Phase.ANSWER
    assert tracker.num_reasoning == 0
    # After an error the phase is found anew, from the prompt's last turn and all of the output.
    tracker.add("opened", [7, WORD, 7, START])
    tracker.say("opened", [WORD])
    tracker.get("opened").known.extend([END, 7, WORD])
    assert tracker.resync("opened")
    assert phase(tracker, "opened") is Phase.ANSWER


def test_second_end_marker_changes_nothing():
    """Only the first end marker of a thought is a boundary."""
    tracker = SpokenTracker(SIMPLE)
    tracker.add("r", [START])
    tracker.say("r", [WORD, END, WORD])
    assert not tracker.say("r", [END])
    assert phase(tracker) is Phase.ANSWER


def test_boundary_inside_accepted_drafts():
    """One step may bring the last thought, the boundary and the first answer tokens."""
    tracker = SpokenTracker(SIMPLE)
    tracker.add("r", [START])
    tracker.say("r", [WORD, WORD, END, WORD, WORD])
    state = tracker.get("r")
    assert (state.phase, state.tokens_in_phase, state.think_tokens) == (Phase.ANSWER, 2, 3)


def test_multi_token_boundary_across_steps():
    """A marker of several tokens is found when steps cut it anywhere."""
    tracker = SpokenTracker(LONG)
    tracker.add("r", [5, 6])
    tracker.say("r", [7])
    assert phase(tracker) is Phase.THINK
    for token in (8, 8, 8):
        tracker.say("r", [token])
        assert phase(tracker) is Phase.THINK
    tracker.say("r", [3])
    assert phase(tracker) is Phase.ANSWER


def test_handoff_end_is_reported():
    """The answer token that ends the hand-off is reported once, for handed-off answers only."""
    tracker = SpokenTracker(SIMPLE, handoff_tokens=2)
    tracker.add("r", [START])
    tracker.add("plain", [WORD])
    tracker.say("r", [END])
    tracker.say("plain", [WORD])
    assert [tracker.say("r", [WORD]) for _ in range(3)] == [False, True, False]
    assert [tracker.say("plain", [WORD]) for _ in range(3)] == [False, False, False]


def test_only_the_step_that_may_end_a_handoff_is_looked_at():
    """Several tokens a step may pass its end; within it, words change nothing."""
    tracker = SpokenTracker(SIMPLE, handoff_tokens=6)
    tracker.add("r", [START])
    tracker.runs("r")
    tracker.say("r", [WORD])
    tracker.say("r", [END])
    tracker.say("r", [WORD])  # the marker is over
    assert tracker.expects([[WORD]], {"r": 0}) == {}
    tracker.say("r", [WORD] * 3)
    assert tracker.expects([[WORD]], {"r": 0}) == {}
    assert tracker.expects([[WORD] * 2], {"r": 0}) == {"r": 7}
    assert tracker.say("r", [WORD] * 4)
    assert tracker.expects([[WORD]], {"r": 0}) == {}


def test_a_pooling_model_samples_nothing():
    tracker = SpokenTracker(SIMPLE)
    tracker.add("r", [WORD])
    tracker.runs("r")
    assert tracker.expects([], {"r": 0}) == {}


def test_single_phase_model():
    """Without boundaries every request answers from its first token."""
    tracker = SpokenTracker(None)
    tracker.add("r", [START])
    tracker.say("r", [WORD])
    assert phase(tracker) is Phase.ANSWER


def test_unknown_and_empty_are_harmless():
    """Tokens of untracked requests and empty steps change nothing."""
    tracker = SpokenTracker(SIMPLE)
    assert not tracker.say("unknown", [END])
    tracker.add("r", [START])
    assert not tracker.say("r", [])
    assert phase(tracker) is Phase.PREFILL
    tracker.remove("unknown")
    tracker.remove("r")
    assert len(tracker) == 0
    assert set(tracker.counts.values()) == {0}


def test_adding_again_starts_over():
    """A streaming session that goes on is judged by all its tokens."""
    tracker = SpokenTracker(SIMPLE)
    tracker.add("r", [START])
    tracker.say("r", [WORD, END, WORD])
    tracker.add("r", [START, WORD, END, WORD, START])
    tracker.say("r", [WORD])
    assert phase(tracker) is Phase.THINK
    assert len(tracker) == 1
    assert sum(tracker.counts.values()) == 1


def test_entered_phases_are_counted_once():
    """Every change of phase is reported to the statistics exactly once."""
    tracker = SpokenTracker(SIMPLE)
    tracker.add("r", [START])
    tracker.say("r", [WORD, END, START])
    assert tracker.drain_entered() == {Phase.THINK: 2, Phase.ANSWER: 1}
    assert tracker.drain_entered() == {}
