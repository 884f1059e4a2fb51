"""Output divided into thought and answer, as the tracker divides it and at any step's length."""

import random
from dataclasses import replace

import pytest

from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import BoundaryMatcher
from meridian_patch.phase.output_phases import OutputPhases, Piece
from meridian_patch.phase.tracker import Phase, PhaseTracker

WORD, START, END = 5, 1, 2
SINGLE = Boundaries("single", ((START,),), ((END,),), (END,))
CALLING = Boundaries("calling", ((START,),), ((END,), (7,)), (END,), implicit_end=((7,),))
ONCE = Boundaries("once", ((START,),), ((END,),), (END,), reopens=False)
TURN = frozenset({8})
LONG = Boundaries("long", ((1, 3),), ((2, 4), (2, 3, 4)), (2, 4))


def phases(prompt=(WORD, START), boundaries=SINGLE):
    return OutputPhases(BoundaryMatcher(boundaries), list(prompt))


def test_the_boundary_is_the_thoughts():
    """Both markers: what completes one is not searched for stop strings."""
    assert phases().split([WORD, END, WORD]) == [Piece(2, False), Piece(3, True)]
    assert phases([WORD]).split([WORD, START, END]) == [Piece(1, True), Piece(3, False)]
    assert phases().split([]) == []


def test_a_request_without_a_thought_is_all_answer():
    """Nothing in the prompt, a closed thought, or a prompt of embeddings."""
    for prompt in ([WORD], [START, WORD, END], []):
        assert phases(prompt).split([WORD] * 3) == [Piece(3, True)]


def test_a_marker_may_span_prompt_and_steps():
    """Its first token in one place, its last in another."""
    split = phases([WORD, 1], LONG)
    assert split.split([3, WORD, 2]) == [Piece(3, False)]
    assert split.split([4]) == [Piece(1, False)]
    assert split.split([WORD]) == [Piece(1, True)]


def test_a_sessions_next_turn_is_what_the_model_sees():
    """Without the last token of the turn before, which may be the boundary."""
    session = phases()
    session.split([WORD, END])
    session.continue_with([WORD])
    assert session.split([WORD]) == [Piece(1, False)]
    session.split([END, WORD])
    session.continue_with([WORD])
    assert session.split([WORD]) == [Piece(1, True)]
    session.continue_with([START])
    assert session.split([WORD]) == [Piece(1, False)]


@pytest.mark.parametrize("boundaries", [SINGLE, ONCE, LONG, CALLING], ids=lambda each: each.family)
@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_trackers_phases(boundaries, seed):
    """Token by token, whatever the steps."""
    rng = random.Random(seed)
    tokens = rng.choices([WORD, 1, 2, 3, 4, *([7] if rng.random() < 0.5 else [])], k=200)
    prompt, output = tokens[:20], tokens[20:]
    tracker, known, expected = PhaseTracker(boundaries), list(prompt), []
    tracker.add("r", known)
    before = tracker.get("r").first_phase
    for token in output:
        known.append(token)
        tracker.observe("r", len(known) - 1)
        after = tracker.get("r").phase
        is_calls = boundaries is CALLING and token == 7
        expected.append(is_calls or Phase.THINK not in (before, after))
        before = after
    split, found = OutputPhases(BoundaryMatcher(boundaries), prompt), []
    while len(found) < len(output):
        step, first = output[len(found) : len(found) + rng.randint(1, 5)], 0
        for stop, is_answer in split.split(step):
            found += [is_answer] * (stop - first)
            first = stop
        assert first == len(step)
    assert found == expected


@pytest.mark.parametrize(
    "boundaries",
    [SINGLE, ONCE, replace(SINGLE, turn_start=TURN), replace(ONCE, turn_start=TURN)],
    ids=["again", "once", "again, with turns", "once, with turns"],
)
@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_a_session_are_the_trackers_phases(boundaries, seed):
    """The model does not see a turn's last token."""
    rng = random.Random(seed)

    def words(vocabulary, most):
        return rng.choices(vocabulary, k=rng.randint(1, most))

    known, split = [WORD, *words([WORD, START, END, 8], 6)], None
    for _ in range(6):
        tracker = PhaseTracker(boundaries)
        tracker.add("r", known)
        if split is None:
            split = OutputPhases(BoundaryMatcher(boundaries), known)
        before = tracker.get("r").first_phase
        for token in words([WORD, WORD, START, END], 12):
            known.append(token)
            tracker.observe("r", len(known) - 1)
            after = tracker.get("r").phase
            [piece] = split.split([token])
            assert piece.is_answer == (Phase.THINK not in (before, after)), known
            before = after
        chunk = words([WORD, START, END, 8], 6)
        known = [*known[:-1], *chunk]
        split.continue_with(chunk)


def test_a_tool_call_that_ends_a_thought_is_the_answers():
    """Its marker may be a stop string of the answer."""
    assert phases(boundaries=CALLING).split([WORD, 7, WORD]) == [Piece(1, False), Piece(3, True)]
    said = [WORD, 7, START, WORD]
    assert phases(boundaries=CALLING).split(said) == [Piece(1, False), Piece(4, True)]


def test_text_of_a_sessions_next_turn_opens_no_thought():
    """A marker in the user's words is followed by the turn that the model goes on with."""
    turned = Boundaries("turned", ((START,),), ((END,),), (END,), turn_start=frozenset({8}))
    session = phases([8, WORD], turned)
    session.split([WORD, WORD])
    session.continue_with([8, START, WORD, 8, WORD])
    assert session.split([WORD]) == [Piece(1, True)]


def test_behind_a_prompt_without_turns_a_thought_may_begin():
    """Examples in a raw prompt have closed thoughts, and end none of the model's own."""
    boundaries = replace(ONCE, turn_start=TURN)
    matcher, tracker = BoundaryMatcher(boundaries), PhaseTracker(boundaries)
    start, end, turn = boundaries.start[0], boundaries.end[0], min(boundaries.turn_start)
    for prompt, thinks in (
        ([*start, 1, *end, 1], True),
        ([turn, *start, 1, *end], False),
    ):
        phases = OutputPhases(matcher, prompt)
        pieces = phases.split([*start, 1])
        assert pieces[-1].is_answer != thinks
        known = list(prompt)
        tracker.add("r", known)
        known.extend([*start, 1])
        tracker.observe("r", len(prompt))
        assert (tracker.get("r").phase is Phase.THINK) == thinks
