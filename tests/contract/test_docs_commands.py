"""The commands that the pages mark as run end as they say, and vLLM's options exist."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import PAGES, ROOT, blocks, words
from fake_server import serving
from missing import skip_but_in_ci
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX
from vllm.utils.argparse_utils import FlexibleArgumentParser

from meridian_patch import envs
from meridian_patch.engine.upstream import is_release

cli_args = importlib.import_module(
    f"vllm.entrypoints.{'common' if is_release('0.33') else 'launchers'}.cli_args"
)
BLOCKS = blocks()
RUN = sorted({command for block in BLOCKS if block.kind == "run" for command in block.commands})
# README.md shows this in one block with commands that need a server of their own.
ALSO = ("meridian doctor",)
README = [
    command
    for block in BLOCKS
    if block.page == "README.md"
    for command in block.commands
    if command.startswith(ALSO)
]
# No patched process of this user runs beside the tests.
EXIT_CODES = {"meridian status": 1}
MODEL = "Qwen/Qwen3-8B"
SLOW = {
    "meridian doctor",
    "meridian doctor Qwen/Qwen3-8B",
    "meridian doctor --url localhost:8000",
}
SERVER = re.compile(r"(?<![\w/])(http://)?localhost:8000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where commands run, one after the other, as a reader's shell would."""
    return tmp_path_factory.mktemp("shell")


@pytest.fixture(scope="module")
def server():
    with serving() as started:
        yield started


def run(command, folder, url, demo_model):
    """Run a command of the pages on the tiny reasoner and on a server of the tests."""
    local = SERVER.sub(url, command.replace(MODEL, str(demo_model)))
    env = {
        name: value
        for name, value in envs.given_environment().items()
        if not name.startswith(("MERIDIAN_PATCH", "VLLM_PLUGINS"))
    }
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["MERIDIAN_PATCH_STATUS_DIR"] = str(folder / "status")
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", local],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        # They begin as `meridian doctor` does, which takes half a minute.
        pytest.param(command, marks=[pytest.mark.nightly] * (command in SLOW))
        for command in sorted({*RUN, *README})
    ],
)
def test_a_command_of_the_pages_runs(command, folder, server, demo_model):
    """It ends with 0, or as it does where no server runs."""
    if words(command)[0] == "sed" and not (folder / "drawn.jsonl").exists():
        skip_but_in_ci("works on what the command before wrote")
    done = run(command, folder, server.url, demo_model)
    assert done.returncode == EXIT_CODES.get(command, 0), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_key_is_asked_for_where_the_page_on_security_says():
    """`/metrics` is not among these paths."""
    page = (ROOT / "docs" / "security.md").read_text()
    (told,) = re.findall(r"asks for the API key below ([^\n]*) only", page)
    assert tuple(re.findall(r"`(/\w+)`", told)) == GUARDED_PREFIX
    assert not "/metrics".startswith(GUARDED_PREFIX)


def test_options_of_vllm_exist():
    """Each option of vLLM that a page names is one of its server's parser."""
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    known = {option for action in parser._actions for option in action.option_strings}
    assert "--max-num-seqs" in known
    named = set(re.findall(r"`(--[a-z][a-z-]+)", (ROOT / "docs" / "tune.md").read_text()))
    assert len(named) > 3
    assert named - {"--like-this", "--epsilon"} <= known
    for page in PAGES:
        for options in re.findall(r"vllm serve [^`\n]*", page.read_text()):
            assert set(re.findall(r"(?<!\S)--[a-z][a-z-]+", options)) <= known, options
