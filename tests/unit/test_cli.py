"""The `meridian` command's own behaviour; what it starts is tested on the engine."""

import subprocess
import sys

import pytest

from meridian_patch import cli

WITHOUT_OPTIONAL = """
import sys
sys.modules |= dict.fromkeys(["aiohttp", "jinja2", "matplotlib", "numpy", "torch", "vllm"])
from meridian_patch import cli
cli.main(sys.argv[1:])
"""


def run(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, capsys.readouterr()


def test_serve_refuses_when_switched_off(monkeypatch, capsys):
    """`meridian serve` under MERIDIAN_PATCH=0 would serve stock: it refuses."""
    monkeypatch.setenv("MERIDIAN_PATCH", "0")
    code, printed = run(["serve", "model"], capsys)
    assert code == 1
    assert "MERIDIAN_PATCH is 0" in printed.err
    assert "vllm serve" in printed.err


def test_serve_without_a_model_prints_its_usage(capsys):
    """Nothing to serve is a usage error, asking for help is not."""
    code, (said, complaint) = run(["serve"], capsys)
    assert (code, complaint) == (2, "")
    assert said.startswith("usage: meridian serve MODEL [--role think|answer]")
    assert run(["serve", "--help"], capsys)[0] == 0


def test_config_shows_values_and_origins(monkeypatch, capsys):
    """`meridian config` prints every key with where its value came from."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    code, printed = run(["config"], capsys)
    assert code == 0
    assert "policy.name" in printed.out
    assert "MERIDIAN_PATCH_SET_POLICY__NAME" in printed.out.replace("\n", "")


def test_a_wrong_value_is_one_sentence(monkeypatch, capsys):
    """Our errors end the command with one line and no traceback."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "fastest")
    code, printed = run(["config"], capsys)
    assert code == 1
    assert printed.err.startswith("meridian: ")
    assert "MERIDIAN_PATCH_SET_POLICY__NAME" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    "command",
    (
        ["calibrate", "--model", ".", "--data", "none.jsonl"],
        ["bench", "exit"],
        ["bench", "fit-cost", "--out", "cost.yaml"],
        ["bench", "replay"],
        ["bench", "serve"],
        ["bench", "validate"],
    ),
)
def test_a_missing_package_is_one_sentence(command, tmp_path):
    """Whatever of the engine or of the extra is imported first: its name, and what to do."""
    (tmp_path / "none.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    ended = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_OPTIONAL, *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith("meridian: the package ")
    assert "pip install meridian-patch[bench]" in ended.stderr
    assert "Traceback" not in ended.stderr
