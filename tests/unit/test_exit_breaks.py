"""Ends of sentences, lines and paragraphs in a vocabulary, and when probes are due."""

import pytest
from exit_streams import BREAKS, LINE, NEWLINE, PARAGRAPH, PLAIN

from meridian_patch.exit.probe_schedule import ProbeSchedule
from meridian_patch.exit.text_breaks import find_breaks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("word", ""),
        (",", ""),
        (".", "s"),
        ("?", "s"),
        ('."', "s"),
        (" !) ", "s"),
        ("。", "s"),
        (".5", ""),
        ("\n", "sln"),
        (")\n", "sl"),
        (".\n\n", "slp"),
        ("\n\n", "slpn"),
        ("\r\n\r\n", "slpn"),
        ("\n  ", "sln"),
        ("\n \n\t", "slpn"),
        ("\nif", "n"),
        ("\n\nif", "pn"),
        (" \n", "sln"),
        ("", ""),
    ],
)
def test_a_token_by_its_text(text, expected):
    """Sentence, line, paragraph, newline: by initials."""
    breaks = find_breaks([(0, "a"), (7, text)])
    found = {"s": breaks.sentence, "l": breaks.line, "p": breaks.paragraph, "n": breaks.newline}
    assert "".join(key for key, ids in found.items() if 7 in ids) == expected
    assert not any(0 in ids for ids in found.values())


def due_points(tokens, *, min_gap, max_gap, think_tokens=0):
    """One token at a time."""
    schedule = ProbeSchedule(min_gap, max_gap, BREAKS, think_tokens)
    found = [schedule.accept([token]) for token in tokens]
    return [due for due in found if due is not None]


def test_paragraph_ends_are_due():
    """Not those too close to the last due point."""
    tokens = [PLAIN] * 9 + [PARAGRAPH, PARAGRAPH] + [PLAIN] * 3 + [PARAGRAPH] + [PLAIN] * 6
    assert due_points(tokens, min_gap=5, max_gap=100) == [10, 15]
    assert due_points(tokens, min_gap=5, max_gap=100, think_tokens=7) == [17, 22]


def test_a_blank_line_of_two_tokens_is_due():
    """Byte-level vocabularies write it so; a line break alone is none."""
    tokens = [PLAIN, NEWLINE, PLAIN, LINE, NEWLINE, PLAIN, PLAIN, PLAIN]
    assert due_points(tokens, min_gap=1, max_gap=100) == [5]


def test_long_paragraphs_are_due_all_the_same():
    """Any token, as many tokens after the last due point."""
    tokens = [PLAIN] * 11 + [PARAGRAPH] + [PLAIN] * 9
    assert due_points(tokens, min_gap=4, max_gap=7) == [7, 12, 19]


def test_the_latest_due_point_counts():
    """Several due points in one step are one probe; the gaps go on from the last."""
    schedule = ProbeSchedule(2, 5, BREAKS)
    assert schedule.accept([PARAGRAPH] * 4 + [PLAIN] * 9) == 9
    assert schedule.due_by == 14
