"""The boundary automaton against plain search."""

import random

import pytest

from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import ROOT, BoundaryMatcher, Event


def matcher(start, end):
    return BoundaryMatcher(Boundaries("test", tuple(start), tuple(end), end[0]))


def events(automaton, tokens, state=ROOT):
    found = []
    for index, token in enumerate(tokens):
        state, event = automaton.step(state, token)
        if event:
            found.append((index, event))
    return found


def test_single_token_markers():
    """One-token markers are reported at their token."""
    automaton = matcher([(1,)], [(2,)])
    assert events(automaton, [9, 1, 9, 2, 2]) == [(1, Event.START), (3, Event.END), (4, Event.END)]


def test_marker_that_restarts_inside_itself():
    """A failed partial match falls back to the longest suffix that still matches."""
    automaton = matcher([(5, 5, 6)], [(7,)])
    assert events(automaton, [5, 5, 5, 6]) == [(3, Event.START)]


def test_several_spellings_of_one_marker():
    """Every spelling of a marker counts, also one that ends inside a longer one."""
    automaton = matcher([(1,)], [(3, 4), (8, 3, 4, 5), (4, 9)])
    assert events(automaton, [3, 4]) == [(1, Event.END)]
    assert events(automaton, [8, 3, 4]) == [(2, Event.END)]
    assert events(automaton, [7, 4, 9]) == [(2, Event.END)]


def test_last_boundary_is_searched_from_the_end():
    """The last marker of a prompt decides, however long the prompt is."""
    automaton = matcher([(1, 2)], [(3,)])
    assert automaton.last_boundary([0] * 1000) == (Event.NONE, 0)
    assert automaton.last_boundary([3, 1, 2, *([0] * 1000)]) == (Event.START, 1)
    assert automaton.last_boundary([1, 2, 3]) == (Event.END, 2)
    assert automaton.last_boundary([2]) == (Event.NONE, 0)


def test_markers_before_the_last_turn_of_a_prompt_are_text():
    """Who asks what a marker means opens no thought; the turn's own marker does."""
    turn = 7
    automaton = BoundaryMatcher(
        Boundaries("test", ((1, 2),), ((3,),), (3,), turn_start=frozenset({turn}))
    )
    asked = [turn, 0, 1, 2, 0, turn, 0]
    assert automaton.last_boundary(asked) == (Event.NONE, 0)
    assert automaton.last_boundary([*asked, *[0] * 9000]) == (Event.NONE, 0)
    assert automaton.last_boundary([*asked, 1, 2, 0]) == (Event.START, 7)
    # A completion without turns counts as a whole, and so does what the model wrote.
    assert automaton.last_boundary([0, 1, 2, 0]) == (Event.START, 1)
    assert automaton.last_boundary([*asked, 3, turn, 0], num_prompt=len(asked)) == (Event.END, 7)


def test_an_end_that_the_answer_begins_with():
    """It is an end like others, and the matcher tells which it was."""
    automaton = BoundaryMatcher(
        Boundaries("test", ((1,),), ((3,), (5, 4), (4,)), (3,), implicit_end=((5, 4),))
    )
    for tokens, begins in (((3,), False), ((5, 4), True), ((4,), False)):
        state = ROOT
        for token in tokens:
            state, event = automaton.step(state, token)
        assert event is Event.END
        assert automaton.begins_answer(state) is begins


def test_half_open_marker_at_the_end_of_a_prompt():
    """A marker may begin in the prompt and end in the output."""
    automaton = matcher([(1, 2, 3)], [(4,)])
    state = automaton.state_after([9, 9, 1, 2])
    assert automaton.step(state, 3)[1] is Event.START


def test_contradictory_markers_are_refused():
    """A sequence cannot both open and end thinking, and cannot be empty."""
    with pytest.raises(ValueError, match="both open and end"):
        matcher([(1,)], [(1,)])
    with pytest.raises(ValueError, match="at least one token"):
        matcher([()], [(1,)])


def slow_last_boundary(tokens, start, end):
    """The same by comparing every place, from the end, the longest spelling first."""
    spellings = sorted(
        [(seq, Event.START) for seq in start] + [(seq, Event.END) for seq in end],
        key=lambda pair: -len(pair[0]),
    )
    for stop in range(len(tokens), 0, -1):
        for sequence, event in spellings:
            begin = stop - len(sequence)
            if begin >= 0 and tuple(tokens[begin:stop]) == sequence:
                return event, begin
    return Event.NONE, 0


def test_the_search_from_the_end_finds_what_a_plain_search_finds():
    """Markers of several tokens across the edges of the parts that the search looks at."""
    rng = random.Random(0)
    start, end = [(1, 2), (5, 1, 2)], [(3,), (4, 4, 6)]
    automaton = matcher(start, end)
    for length in (0, 1, 63, 64, 65, 4159, 4160, 4161, 9000):
        for _ in range(20):
            tokens = [0] * length
            for _ in range(rng.randrange(4)):
                marker = rng.choice([*start, *end, (1,), (4, 4)])
                at = rng.randrange(length + 1)
                tokens[at : at + len(marker)] = marker[: length - at]
            expected = slow_last_boundary(tokens, start, end)
            assert automaton.last_boundary(tokens) == expected


class CountedList(list):
    """Counts what Python code takes out of it."""

    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)


def test_a_long_prompt_without_a_marker_is_searched_by_c_calls():
    """128 k tokens in under a thousand reads, each of which takes a part; a look at each token
    takes five times as long."""
    tokens = CountedList(range(1000, 1000 + 131_072))
    assert matcher([(1, 2)], [(3,)]).last_boundary(tokens) == (Event.NONE, 0)
    assert 0 < tokens.reads < 1000
