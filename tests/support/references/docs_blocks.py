"""Command blocks of README.md, CONTRIBUTING.md, docs/ and examples/, and how they are marked.

A comment right before a block says whether its commands are run:

``<!-- run -->``              `tests/contract/test_docs_commands.py` runs each of them
``<!-- run by: TEST, ... -->``  these tests run them, or the same with other models and sizes
``<!-- not run: REASON -->``  no test does
"""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for folder in ("docs", "examples") for page in (ROOT / folder).rglob("*.md")),
]
_BLOCK = re.compile(
    r"^(?P<mark> *<!-- (?P<kind>run by|not run|run)(?:: (?P<told>[^\n]*))? -->\n)?"
    r"^(?P<indent> *)```(?P<language>console|sh|bash|shell)\n(?P<text>.*?)^ *```$",
    flags=re.MULTILINE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S*")


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        page: where it stands, from the repository's root.
        kind: ``run``, ``run by`` or ``not run``; None: it has no mark.
        told: the tests, or the reason; empty for ``run``.
        commands: each line that a ``$`` begins, with those that continue it, without comments.
    """

    page: str
    kind: str | None
    told: str
    commands: tuple[str, ...]


def blocks() -> list[Block]:
    """All command blocks, in the order of the pages."""
    return [
        Block(
            str(page.relative_to(ROOT)),
            found["kind"],
            found["told"] or "",
            _commands(textwrap.dedent(found["text"])),
        )
        for page in PAGES
        for found in _BLOCK.finditer(page.read_text())
    ]


def _commands(text: str) -> tuple[str, ...]:
    commands: list[str] = []
    is_open = False
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(line.removeprefix("$ "))
        elif is_open:
            commands[-1] += "\n" + line
        is_open = bool(commands) and (
            (line.startswith("$ ") or is_open)
            and (line.endswith("\\") or commands[-1].count("'") % 2 == 1)
        )
    return tuple(re.sub(r"\s+# .*$", "", command) for command in commands)


def words(command: str) -> list[str]:
    """The words of a command, without assignments before it, and up to a redirection or pipe."""
    found = shlex.split(command.replace("\\\n", " "))
    while found and _ASSIGNMENT.fullmatch(found[0]):
        found.pop(0)
    ends = [index for index, word in enumerate(found) if word in {">", "|", "&&", ";"}]
    return found[: ends[0]] if ends else found
