"""Each command block of the pages is marked, and its options are those that the programs have."""

import ast
import re

import pytest
from docs_blocks import ROOT, blocks, words
from gpu_suite import command as gpu_suite
from marathon import command as marathon

from meridian_patch import cli
from meridian_patch.demo import problems

BLOCKS = blocks()
COMMANDS = sorted({command for block in BLOCKS for command in block.commands})
OURS = [command for command in COMMANDS if words(command)[:1] == ["meridian"]]
# What a mark names: a file, and a test in it.
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def test_blocks_are_found():
    """The pages have blocks at all, and each has a command."""
    assert len(BLOCKS) > 25
    assert len(OURS) > 20
    assert all(block.commands for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}: {block.commands[0]}")
def test_every_block_is_run_or_marked_as_not_run(block):
    """A mark that says who runs it names tests that exist; any other gives a reason."""
    assert block.kind, "write <!-- run -->, <!-- run by: TEST --> or <!-- not run: REASON --> above"
    if block.kind == "run by":
        named = NAMED.findall(block.told)
        assert len(named) == len(block.told.split(", "))
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            assert name in {each.name for each in ast.walk(tree) if hasattr(each, "name")}
    else:
        assert bool(block.told) is (block.kind == "not run")


@pytest.mark.parametrize("command", OURS)
def test_the_command_line_parses(command):
    """Subcommand, options and their values are those of the real parser."""
    _, *arguments = words(command)
    if arguments[0] == "serve":  # the rest is vLLM's
        return
    if arguments == ["--version"]:
        return
    cli._parser().parse_args(arguments)


def options_of(command):
    """Words of a command that are options, without their values."""
    return {word.partition("=")[0] for word in words(command) if re.match(r"--?[a-z]", word)}


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if words(each)[0].startswith("scripts/")]
)
def test_a_script_has_the_options(command):
    """The script exists, and its options stand in it or in what it starts."""
    path = ROOT / words(command)[0]
    text = path.read_text()
    started = {"gpu_suite": gpu_suite, "marathon": marathon}.get(path.name)
    if started is not None:
        text += (ROOT / started.__file__).read_text()
    if path.name == "setup":
        text = text.replace('f"--{build}"', '"--cpu" "--cuda"')
    for option in options_of(command):
        assert f'"{option}"' in text or f"{option})" in text, option


def test_the_problems_have_their_options(capsys):
    """`python -P -m meridian_patch.demo.problems` as the page on calibration says."""
    (command,) = [each for each in COMMANDS if "meridian_patch.demo.problems --" in each]
    arguments = words(command)
    source = (ROOT / "meridian_patch" / "demo" / "problems.py").read_text()
    assert arguments[:3] == ["python", "-P", "-m"]
    assert problems.__name__ == arguments[3]
    assert all(f'"{option}"' in source for option in options_of(" ".join(arguments[4:])))
