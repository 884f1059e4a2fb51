"""docs/model-families.md is what the family files say."""

from pathlib import Path

from meridian_patch.config.family_docs import render_families
from meridian_patch.config.family_files import load_families

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "model-families.md"
RULES = ("strip", "keep_in_tool_loop", "keep", "unverified")


def rows():
    """The table's cells, by line."""
    table = render_families().partition("|---|")[2]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [line.replace("\\|", "BAR").split("|") for line in lines]


def test_page_is_current():
    """A changed family file needs `python scripts/gen_docs.py`."""
    assert PAGE.read_text() == render_families()


def test_every_family_has_one_row():
    """No family is left out, and no bar inside a cell makes more columns."""
    names = [cells[1].strip(" `") for cells in rows()]
    assert sorted(names) == sorted(load_families())
    assert {len(cells) for cells in rows()} == {8}


def test_rows_are_sorted_by_rule_then_name():
    """A reader finds the families that behave alike beside each other."""
    keys = [(RULES.index(cells[2].strip(" `")), cells[1]) for cells in rows()]
    assert keys == sorted(keys)


def test_row_tells_what_the_file_says():
    """Rule, markers, line, source, provenance and note stand in the family's row."""
    (row,) = (line for line in render_families().splitlines() if line.startswith("| `qwen38`"))
    for part in ("`keep`", "`<tool_call>`", "preserve_thinking is undefined", "(verified)"):
        assert part in row
    (row,) = (line for line in render_families().splitlines() if line.startswith("| `gpt_oss`"))
    assert "`<\\|call\\|>`" in row
