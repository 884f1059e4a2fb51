"""The recipes of docs/contributing.md fit the code."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

from meridian_patch.config.family_files import load_families
from meridian_patch.exit.strategies.base import NO_SIGNALS, Signals

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "contributing.md").read_text()
NEW = {line.split("`")[1] for line in PAGE.splitlines() if "(new)" in line}


def blocks(language):
    """Code blocks of the page in one language, without their indentation."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def block_with(language, text):
    (block,) = (block for block in blocks(language) if text in block)
    return block


def test_every_path_exists():
    """Files and folders that a recipe names are there, but for those it says are new."""
    names = set(re.findall(r"`([\w./]+(?:\.py|\.md|\.toml|\.json|/))`", PAGE)) - NEW
    assert len(names) > 20
    support = [path for path in (ROOT / "tests" / "support").iterdir() if path.is_dir()]
    package = ROOT / "meridian_patch"
    folders = (ROOT, *support, package, package / "engine" / "scheduler")
    for name in names:
        assert any((folder / name).exists() for folder in folders), name


def test_new_files_are_new():
    """A recipe whose example has become part of the code needs another example."""
    assert len(NEW) == 3
    assert not [name for name in NEW if (ROOT / name).exists()]


@pytest.mark.parametrize("block", blocks("python"))
def test_snippets_are_python(block):
    """Each parses by itself, or as the end of a function."""
    ast.parse(block if "return" not in block else f"def f():\n{textwrap.indent(block, ' ')}")


def test_the_family_of_the_recipe_loads(tmp_path):
    """The file as it stands there is a family file."""
    (tmp_path / "acme_think.yaml").write_text(block_with("yaml", "acme_think"))
    assert load_families(tmp_path)["acme_think"].family.end == "</think>"


def test_the_strategy_of_the_recipe_fires():
    """A sequence of two tokens that stands there three times closes a thought, in any pieces."""
    text = block_with("python", "class Repetition")
    names: dict[str, object] = {}
    exec(text, names)
    strategy = names["Repetition"](2, 3)
    tokens = [9, 1, 2, 1, 2, 1, 2, 1]
    firings = [strategy.accept([token], Signals.of([NO_SIGNALS]), 0) for token in tokens]
    assert [firing is not None for firing in firings] == [False] * 6 + [True] * 2


def test_the_rule_of_the_recipe_decides():
    """The decision is a function of numbers."""
    names: dict[str, object] = {}
    exec(block_with("python", "def most_running"), names)
    assert names["most_running"](1, 64) == 64
    assert names["most_running"](0, 64) is None
