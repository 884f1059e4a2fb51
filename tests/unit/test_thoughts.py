"""Where the first thought of a request stands."""

import random

import pytest
from spoken import SpokenTracker

from meridian_patch.config.family_files import load_families
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import BoundaryMatcher
from meridian_patch.phase.thoughts import MAX_SHORT_TOKENS, holds_any
from meridian_patch.phase.thoughts import find_first_thought as find
from meridian_patch.phase.tracker import PhaseTracker

START, END, WORD, LINE = 1, 2, 9, 10
SIMPLE = Boundaries("test", ((START,),), ((END,),), (END,))
LONG = Boundaries("test", ((5, 6, 7),), ((8, 8, 3),), (8, 8, 3))
# Two spellings of each marker; the short start is the tail of the long one.
SPELLINGS = Boundaries("test", ((5, 6), (4, 5, 6)), ((8,), (7, 7)), (8,))
PROMPT_TOKENS = 4096


def find_first_thought(tokens, boundaries):
    return find(tokens, BoundaryMatcher(boundaries))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], None),
        ([WORD] * 5, None),
        ([WORD, END, WORD], None),
        ([START, WORD], 0),
        ([WORD, WORD, START], 2),
        ([WORD, START, WORD, START], 1),
        ([WORD, START, *[WORD] * 40, END, WORD, START], 1),
    ],
    ids=["empty", "none", "end-only", "first", "last", "two", "closed-then-open"],
)
def test_first_thought_of_a_prompt(tokens, expected):
    """It begins at the first start marker."""
    assert find_first_thought(tokens, SIMPLE) == expected


@pytest.mark.parametrize("between", [0, 1, 2, 10, MAX_SHORT_TOKENS])
def test_short_thoughts_are_no_thoughts(between):
    """Templates write empty ones for turns without thinking, system prompts show the format."""
    empty = [START, *[LINE] * between, END]
    assert find_first_thought([WORD, *empty], SIMPLE) is None
    assert find_first_thought([WORD, *empty, WORD, *empty], SIMPLE) is None
    assert find_first_thought([WORD, *empty, WORD, START], SIMPLE) == 1 + len(empty) + 1


def test_a_longer_thought_is_a_thought():
    """One token more, and it counts."""
    short = [START, *[WORD] * (MAX_SHORT_TOKENS + 1), END]
    assert find_first_thought([WORD, *short], SIMPLE) == 1


def test_markers_of_several_tokens():
    """All tokens of a marker count; a part of one does not."""
    assert find_first_thought([5, 6, WORD, 5, 6, 7, WORD], LONG) == 3
    assert find_first_thought([WORD, 5, 6, 7], LONG) == 1
    assert find_first_thought([WORD, 5, 6], LONG) is None
    assert find_first_thought([5, 5, 6, 7], LONG) == 1
    gap = [WORD] * MAX_SHORT_TOKENS
    assert find_first_thought([WORD, 5, 6, 7, *gap, 8, 8, 3], LONG) is None
    assert find_first_thought([WORD, 5, 6, 7, WORD, *gap, 8, 8, 3], LONG) == 1
    assert find_first_thought([WORD, 5, 6, 7, WORD, 8, 8], LONG) == 1


def test_several_spellings():
    """Any spelling opens a thought, any spelling closes an empty one."""
    assert find_first_thought([WORD, 5, 6, WORD], SPELLINGS) == 1
    assert find_first_thought([WORD, 4, 5, 6, WORD], SPELLINGS) == 1
    assert find_first_thought([5, 6, 8, WORD, 4, 5, 6], SPELLINGS) == 4
    assert find_first_thought([4, 5, 6, LINE, 7, 7, WORD, 5, 6], SPELLINGS) == 7
    assert find_first_thought([5, 6, LINE, 7, 7], SPELLINGS) is None


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_and_tuples(kind):
    """Prompts come as either."""
    assert find_first_thought(kind([WORD, 5, 6, 7]), LONG) == 1


def test_holds_any():
    """Found anywhere, whole only."""
    markers = ((3, 4), (6,))
    assert holds_any([WORD, 3, 4], markers)
    assert holds_any([6], markers)
    assert holds_any([3, 3, 4, WORD], markers)
    assert not holds_any([3, WORD, 4, 3], markers)
    assert not holds_any([], markers)
    assert not holds_any([3, 4], ())


class Counted(list):
    """Tokens that count how often one of them is read, also by the slices of them."""

    def __init__(self, tokens, reads):
        super().__init__(tokens)
        self.reads = reads

    def __getitem__(self, place):
        found = super().__getitem__(place)
        if not isinstance(place, slice):
            self.reads.append(1)
            return found
        self.reads.append(len(found))
        return Counted(found, self.reads)

    def __iter__(self):
        self.reads.append(len(self))
        return super().__iter__()


def in_characters(family):
    """Boundaries of a model without tokens of its own for its markers: one per character."""
    pairs = [(family.start, family.end), *((each.start, each.end) for each in family.alternatives)]
    starts, ends = (
        tuple({tuple(map(ord, text)): None for text in texts}) for texts in zip(*pairs, strict=True)
    )
    return Boundaries(family.family, starts, ends, ends[0])


def from_ids(family):
    """Boundaries by a family's documented token ids."""
    ids = family.documented_ids
    return Boundaries(family.family, (tuple(ids.start),), (tuple(ids.end),), tuple(ids.end))


FAMILIES = [loaded.family for loaded in load_families().values()]
OF_SEVERAL = [in_characters(family) for family in FAMILIES] + [
    from_ids(family)
    for family in FAMILIES
    if family.documented_ids.start
    and family.documented_ids.end
    and max(len(family.documented_ids.start), len(family.documented_ids.end)) > 1
]


def stuffed_prompts(boundaries):
    """Prompts of markers, of parts of markers, and of empty thoughts."""
    for start in boundaries.start:
        yield from ((*start, *end) for end in boundaries.end)
    for marker in (*boundaries.start, *boundaries.end):
        yield from (marker, marker[:-1], marker[1:], marker[:1], marker[-1:])


@pytest.mark.parametrize("boundaries", OF_SEVERAL, ids=lambda each: each.family)
def test_a_prompt_of_markers_is_read_a_few_times(boundaries):
    """Whatever it is stuffed with, and however often its first thought is asked for."""
    for piece in filter(None, stuffed_prompts(boundaries)):
        reads = []
        prompt = Counted((piece * PROMPT_TOKENS)[:PROMPT_TOKENS], reads)
        tracker = PhaseTracker(boundaries)
        tracker.add("r", prompt)
        for _ in range(3):
            _ = tracker.get("r").first_thought
        assert sum(reads) <= 7 * PROMPT_TOKENS, piece


def first_by_definition(tokens, boundaries):
    """The first start with no end within so many tokens behind it, by looking at every place."""
    for first in range(len(tokens)):
        for start in boundaries.start:
            behind = first + len(start)
            if tuple(tokens[first:behind]) != start:
                continue
            near = [tokens[at : at + 3] for at in range(behind, behind + MAX_SHORT_TOKENS + 1)]
            ends = boundaries.end
            if not any(tuple(part[: len(end)]) == end for part in near for end in ends):
                return first
    return None


@pytest.mark.parametrize("boundaries", [SIMPLE, LONG, SPELLINGS])
def test_the_first_thought_is_that_of_the_definition(boundaries):
    rng = random.Random(3)
    pieces = [*boundaries.start, *boundaries.end, (WORD,), (WORD,) * 20, (LINE,) * 12, (5,), (8,)]
    for _ in range(400):
        tokens = [token for _ in range(rng.randrange(12)) for token in rng.choice(pieces)]
        assert find_first_thought(tokens, boundaries) == first_by_definition(tokens, boundaries)


def routed(boundaries, prompt, *steps):
    tracker = SpokenTracker(boundaries)
    tracker.add("r", prompt)
    for step in steps:
        tracker.say("r", step)
    return tracker.get("r")


def first_thought(*args):
    return routed(*args).first_thought


def own_thought(*args):
    return routed(*args).own_thought


def test_the_tracker_knows_which_thought_is_the_requests_own():
    """What stands closed in the prompt is not; what the prompt opens or the output begins is."""
    closed = [START, *[WORD] * 40, END]
    assert own_thought(SIMPLE, [*closed, WORD], [WORD]) is None
    assert own_thought(SIMPLE, [*closed, WORD, START]) == len(closed) + 1
    assert own_thought(SIMPLE, [*closed, WORD], [WORD, START], [END, START]) == len(closed) + 2
    assert own_thought(SPELLINGS, [WORD, 4, 5, 6]) == 1


def test_the_tracker_knows_a_thought_that_the_prompt_opened():
    """It is known before the first token, and a later thought does not move it."""
    prompt = [WORD, WORD, START]
    assert first_thought(SIMPLE, prompt) == 2
    assert first_thought(SIMPLE, prompt, [WORD, END, WORD, START]) == 2


def test_the_tracker_knows_a_thought_that_earlier_turns_kept():
    """A kept thought in the prompt is the first one, though the request answers."""
    history = [WORD, START, *[WORD] * 40, END, WORD]
    assert first_thought(SIMPLE, history, [WORD]) == 1


def test_the_tracker_knows_a_thought_that_the_output_opened():
    """It is the index among all tokens, the prompt's first."""
    assert first_thought(SIMPLE, [WORD] * 3, [WORD, WORD]) is None
    assert first_thought(SIMPLE, [WORD] * 3, [WORD, WORD], [START]) == 5
    assert first_thought(SIMPLE, [WORD] * 3, [WORD, START, WORD, END], [START]) == 4


def test_a_marker_of_several_tokens_may_span_prompt_and_steps():
    """The thought begins where its marker does."""
    assert first_thought(LONG, [WORD] * 3, [5], [6], [7]) == 3
    assert first_thought(LONG, [WORD, 5], [6, 7]) == 1
    assert first_thought(LONG, [WORD, 5], [6]) is None


def test_with_several_spellings_an_output_thought_is_never_placed_too_late():
    """Which spelling was written is not remembered; the longest one is assumed."""
    assert first_thought(SPELLINGS, [WORD] * 3, [4, 5, 6]) == 3
    assert first_thought(SPELLINGS, [WORD] * 3, [5, 6]) == 2


def test_an_empty_thought_in_the_prompt_leaves_room_for_a_later_one():
    """Thinking was off in the prompt; the model thinks nevertheless."""
    prompt = [WORD, START, LINE, END]
    assert first_thought(SIMPLE, prompt, [WORD]) is None
    assert first_thought(SIMPLE, prompt, [WORD, START]) == 5


def test_no_boundaries_no_thought():
    """A single-phase model has none."""
    assert first_thought(None, [START, WORD], [START]) is None
