"""Reasoning tokens by phase changes against a count by token ids, for the families' markers."""

import random
from dataclasses import replace

import pytest
from phase_steps import play

from meridian_patch.config.family_files import load_families
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.progress import ANSWER, THINK, TURNING, PhaseChange, PhaseProgress

WORD, OTHER = 5, 6
FAMILIES = {
    name: file.family
    for name, file in load_families().items()
    if file.family.documented_ids.start and file.family.documented_ids.end
}


def boundaries_of(family) -> Boundaries:
    """Those of a family's documented ids."""
    ids = family.documented_ids
    end = tuple(ids.end)
    return Boundaries(family.family, (tuple(ids.start),), (end,), end)


def count_by_ids(prompt, output, boundaries) -> list[int]:
    """Reasoning tokens among the first n output tokens, for each n: all but whole markers.

    An independent count: it goes through prompt and output once, marker by marker.
    """
    (start,), (end,) = boundaries.start, boundaries.end
    known, counts, count, is_open, index = [*prompt, *output], [], 0, False, 0
    while index < len(known):
        marker = next((m for m in (start, end) if tuple(known[index : index + len(m)]) == m), None)
        step = len(marker) if marker else 1
        for offset in range(step):
            if index + offset >= len(prompt):
                # Tokens of a marker count until it is whole: only then it is one.
                partial = offset + 1 if is_open and marker and offset + 1 < step else 0
                count += is_open and not marker
                counts.append(count + partial)
        if marker:
            is_open = marker == start
        index += step
    return counts


OUTPUTS = {
    "opened": (True, [("words", 9), "end", ("words", 4)]),
    "opened and cut": (True, [("words", 9)]),
    "opened and empty": (True, ["end", ("words", 3)]),
    "own": (False, ["start", ("words", 9), "end", ("words", 4)]),
    "own and cut": (False, ["start", ("words", 9)]),
    "twice": (
        True,
        [("words", 5), "end", ("words", 3), "start", ("words", 7), "end", ("words", 2)],
    ),
    "none": (False, [("words", 6)]),
}


@pytest.mark.parametrize("case", OUTPUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_counts_are_those_by_token_ids(name, case):
    """For the template that opens the thought and the model that does, at any step's length."""
    boundaries = boundaries_of(FAMILIES[name])
    is_opened, pieces = OUTPUTS[case]
    markers = {"start": list(boundaries.start[0]), "end": list(boundaries.end[0])}
    prompt = [WORD, OTHER, *(markers["start"] if is_opened else ())]
    output = []
    for piece in pieces:
        output += markers[piece] if isinstance(piece, str) else [WORD] * piece[1]
    expected = count_by_ids(prompt, output, boundaries)
    for seed in range(5):
        progress, counts = play(boundaries, prompt, output, random.Random(seed))
        assert counts == {n: expected[n - 1] for n in counts}
        assert progress.num_tokens == len(output)


def test_there_are_enough_families():
    """The table above is not empty by mistake, and has markers of several tokens."""
    assert len(FAMILIES) >= 8
    assert any(len(family.documented_ids.end) > 1 for family in FAMILIES.values())


def test_a_reader_who_lags_behind_gets_its_own_count():
    """Outputs run ahead of what a stream has said: the count is of what was said."""
    progress = PhaseProgress()
    progress.take(PhaseChange(True, 0, 0), 1)
    progress.take(None, 9)
    assert progress.reasoning_tokens(4) == 4
    progress.take(PhaseChange(False, 11, 10), 3)
    assert [progress.reasoning_tokens(n) for n in (4, 10, 11, 13)] == [4, 10, 10, 10]


def test_nothing_is_known_without_a_change():
    """Of a stock scheduler, or of a model without boundaries: there is no count."""
    progress = PhaseProgress()
    assert progress.take(None, 3) == 0
    assert progress.reasoning_tokens(3) is None
    assert progress.place is None


def test_places_and_answer_tokens():
    """The boundary is the thought's last token, and what follows it is the answer's first."""
    progress = PhaseProgress()
    assert (progress.take(PhaseChange(True, 0, 0), 1), progress.place) == (0, THINK)
    assert (progress.take(PhaseChange(False, 2, 1), 1), progress.place) == (0, TURNING)
    assert (progress.take(None, 1), progress.place) == (1, ANSWER)
    # Drafts may bring the boundary and answer tokens in one step.
    drafted = PhaseProgress()
    drafted.take(PhaseChange(True, 0, 0), 1)
    assert (drafted.take(PhaseChange(False, 3, 2), 5), drafted.place) == (3, ANSWER)


def test_a_thought_takes_the_first_answer_back():
    """What a model says before it opens a thought was not its answer."""
    progress = PhaseProgress()
    progress.take(PhaseChange(False, 0, 0), 1)
    progress.ttfat_s = 0.3
    progress.take(PhaseChange(True, 2, 0), 1)
    assert progress.ttfat_s is None
    assert progress.has_thought


def test_an_end_that_shares_tokens_with_the_start_takes_none_from_before_the_thought():
    """The marker's tokens in the thought are fewer than the marker's: never less than nothing."""
    shared = Boundaries("mine", ((10, 11),), ((11, 12),), (11, 12))
    for seed in range(5):
        progress, counts = play(shared, [WORD], [10, 11, 12, WORD, WORD], random.Random(seed))
        assert min(counts.values()) >= 0
        assert progress.reasoning_tokens(5) == 0


def test_a_phase_that_is_lost_leaves_no_count():
    """The tracker was switched off, or a step could not be followed."""
    progress = PhaseProgress()
    progress.take(PhaseChange(True, 0, 0), 3)
    assert progress.take(PhaseChange.unknown(), 2) == 0
    assert progress.take(None, 4) == 0
    assert progress.reasoning_tokens(9) is None
    assert progress.place is None


CALLING = Boundaries("mine", ((10,),), ((20,), (30, 31)), (20,), implicit_end=((30, 31),))
EARLY = replace(CALLING, counts_preamble=True)


def test_a_tool_call_ends_a_thought_and_is_the_answers():
    """All of the call is answer, its marker too, whatever the steps."""
    for seed in range(8):
        output = [WORD] * 6 + [30, 31] + [OTHER] * 3
        progress, counts = play(CALLING, [WORD, 10], output, random.Random(seed))
        assert progress.place == ANSWER
        assert progress.phase_begin == 6
        assert counts[len(output)] == 6


@pytest.mark.parametrize(
    ("boundaries", "prompt", "expected"),
    [
        # The server's parser begins within a thought: clients get both pieces as reasoning.
        (EARLY, [WORD], 4 + 6),
        (CALLING, [WORD], 6),
        # Thinking was switched off: what comes before a thought is an answer to every parser.
        (EARLY, [10, 20], 6),
        (EARLY, [WORD, 10], 4 + 6),
    ],
)
def test_text_before_a_thought_that_the_model_opens(boundaries, prompt, expected):
    """It counts where clients get it as reasoning; markers never do."""
    output = [WORD] * 4 + [10] + [WORD] * 6 + [20, OTHER]
    if prompt[-1] == 10:
        expected += 1
    for seed in range(8):
        _, counts = play(boundaries, prompt, output, random.Random(seed))
        assert counts[len(output)] == expected


def test_the_token_that_ends_a_request_is_not_reasoning():
    """A thought that never closed: its end of sequence is no part of it."""
    progress = PhaseProgress()
    progress.take(PhaseChange(True, 0, 0), 1)
    progress.take(None, 61)
    progress.is_stopped = True
    assert progress.reasoning_tokens(62) == 61
    # A reader that lags behind gets all of what it was sent.
    assert progress.reasoning_tokens(40) == 40
    # In an answer nothing changes.
    progress.take(PhaseChange(False, 63, 62), 3)
    assert progress.reasoning_tokens(65) == 62
