"""What the README promises exists."""

import ast
import re
from pathlib import Path

import pytest

from meridian_patch import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NAMED_TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", README)))


def test_readme_names_tests():
    """The table of what is verified names tests at all."""
    assert len(NAMED_TESTS) >= 10


@pytest.mark.parametrize(("path", "name"), NAMED_TESTS)
def test_named_test_exists(path, name):
    """Each tick of the table names a test that is there."""
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_demo_table_is_filled_in():
    """The README shows what the demo prints, and how it was obtained."""
    table = README.partition("<!-- demo-table -->")[2].partition("<!-- /demo-table -->")[0]
    for words in ("worst answer gap", "answer preemptions", "measured-cpu"):
        assert words in table.lower()


def test_turns_table_says_how_it_was_obtained():
    """Replayed and served figures are told apart."""
    table = README.partition("<!-- turns-table -->")[2].partition("<!-- /turns-table -->")[0]
    for words in ("`simulated`", "`measured-cpu`", "meridian bench turns", "avoidable misses"):
        assert words in table


@pytest.mark.parametrize("command", sorted(set(re.findall(r"meridian (\w+)", README))))
def test_meridian_commands_exist(command, capsys):
    """Each `meridian` command of the README is one the program knows."""
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    capsys.readouterr()


@pytest.mark.parametrize("link", re.findall(r"\]\(([\w./-]+)\)", README))
def test_links_lead_somewhere(link):
    """No link of the README is dead."""
    assert (ROOT / link).exists()
