"""What the README and the pages promise exists."""

import ast
import re
from pathlib import Path

import pytest

from meridian_patch import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
VERIFICATION = (ROOT / "docs" / "verification.md").read_text()
FIGURES = (ROOT / "docs" / "benchmarks" / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMED_TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", VERIFICATION)))
# A link of a page to a file beside it, with or without a heading's anchor.
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
MOST_README_LINES = 110
# Of a page's beginning that a newcomer reads before the command that installs.
MOST_WORDS_BEFORE_INSTALL = 150


def test_verification_names_tests():
    """The tables of what is verified name tests at all."""
    assert len(NAMED_TESTS) >= 90


@pytest.mark.parametrize(("path", "name"), NAMED_TESTS)
def test_named_test_exists(path, name):
    """Each promise of the tables names a test that is there."""
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_readme_is_short():
    """A newcomer reads the README whole; what is longer stands on a page of docs/."""
    assert len(README.splitlines()) <= MOST_README_LINES


def test_the_first_screen_installs_runs_checks_and_switches_off():
    """Four commands to copy, before anything that explains."""
    before, _, after = README.partition("```console\n")
    assert len(before.split()) <= MOST_WORDS_BEFORE_INSTALL
    commands = [line.partition(" #")[0].strip() for line in after.partition("```")[0].splitlines()]
    assert commands == [
        "$ pip install .",
        "$ VLLM_PLUGINS=meridian_patch vllm serve Qwen/Qwen3-8B",
        "$ meridian doctor --url localhost:8000",
        "$ MERIDIAN_PATCH=0 vllm serve Qwen/Qwen3-8B",
    ]


def test_abbreviations_are_expanded_where_they_first_stand():
    assert README.index("TTFAT") == README.index("TTFAT is the time to the first answer token")


def test_readme_has_one_picture_at_the_top():
    """It stands before the first heading, and its caption says how it was obtained."""
    top, _, rest = README.partition("\n## ")
    assert top.count("![") == 1
    assert "![" not in rest
    assert "`simulated`" in top
    assert "with the command](docs/benchmarks/" in top


def test_demo_table_is_filled_in():
    """The README shows what the demo prints, and how it was obtained."""
    table = README.partition("<!-- demo-table -->")[2].partition("<!-- /demo-table -->")[0]
    for words in ("worst answer gap", "prompt tokens computed again", "by chance", "emulated"):
        assert words in table.lower()


def test_demo_rows_are_those_of_the_page():
    """Each row of the README's table says what the demo's page says."""
    table = README.partition("<!-- demo-table -->")[2].partition("<!-- /demo-table -->")[0]
    page = (ROOT / "docs" / "benchmarks" / "2026-11-26-demo-emulated.md").read_text()
    rows = [line.split(" | ") for line in table.splitlines() if re.match(r"\| \w", line)]
    assert len(rows) >= 6
    for name, stock, *others in rows:
        # The page's tables have the second stock server, too.
        lines = [line for line in page.splitlines() if line.startswith(f"{name} | {stock} | ")]
        cells = [line.split(" | ") for line in lines]
        assert others in [[*row[3:5], *row[6:]] for row in cells]


def test_turns_table_says_how_it_was_obtained():
    """Replayed and served figures are told apart."""
    table = FIGURES.partition("<!-- turns-table -->")[2].partition("<!-- /turns-table -->")[0]
    command = "meridian bench sweep --workload s-turns"
    for words in ("`simulated`", "`measured-cpu`", command, "avoidable misses"):
        assert words in table


@pytest.mark.parametrize("command", sorted(set(re.findall(r"meridian (\w+)", README))))
def test_meridian_commands_exist(command, capsys):
    """Each `meridian` command of the README is one the program knows."""
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    capsys.readouterr()


def anchors(page):
    """The anchors of a page's headings, as a code host makes them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """No link to a file or to a heading is dead."""
    for target, anchor in LINK.findall(page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_every_page_of_figures_is_listed():
    """docs/benchmarks/README.md names every page beside it."""
    pages = {path.name for path in (ROOT / "docs" / "benchmarks").glob("*.md")} - {"README.md"}
    assert pages == {target for target, _ in LINK.findall(FIGURES) if "/" not in target}
