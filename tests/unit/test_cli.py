"""The `meridian` command's own behaviour; what it starts is tested on the engine."""

import json
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


def test_serve_without_a_model_prints_its_usage(capsys):
    """Nothing to serve is a usage error, asking for help is not."""
    code, (said, complaint) = run(["serve"], capsys)
    assert (code, complaint) == (2, "")
    assert said.startswith("usage: meridian serve MODEL [--role think --answer URL")
    assert run(["serve", "--help"], capsys)[0] == 0


def test_config_shows_values_and_origins(monkeypatch, capsys):
    """`meridian config` prints every key with where its value came from."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    code, printed = run(["config"], capsys)
    assert code == 0
    assert "policy.name" in printed.out
    assert "MERIDIAN_PATCH_SET_POLICY__NAME" in printed.out.replace("\n", "")


def test_config_shows_values_as_they_are(monkeypatch, capsys):
    """Neither markup of rich nor an escape of the terminal, and keys with dots of their own."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__WRAP_UP", '"[/red] [b]so[/b] :100: \\e[31m"')
    monkeypatch.setenv("MERIDIAN_PATCH_SET_PROVENANCE", "{a.b: '[/x]'}")
    monkeypatch.setenv("COLUMNS", "200")
    code, printed = run(["config"], capsys)
    assert code == 0
    assert r"[/red] [b]so[/b] :100: \x1b[31m" in printed.out
    assert "provenance.a.b" in printed.out
    assert "[/x]" in printed.out


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    """Whatever command it is given to."""
    out = tmp_path / "file"
    out.write_text("")
    trace = tmp_path / "trace.jsonl"
    event = {"event": "probe", "request": "a-0", "thought": 1, "think_tokens": 3}
    trace.write_text(json.dumps(event | {"entropy_nats": 1.0, "variance_nats2": None}) + "\n")
    code, printed = run(
        ["bench", "exit-trace", str(trace), "--out", str(out / "a" / "b.png")], capsys
    )
    assert code == 1
    assert printed.err.startswith(f"meridian: {out}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("POLICY__NMAE", "noop", "unknown key policy.nmae; did you mean name?"),
        ("FAMILY", "none_such", "family is 'none_such', which no family file describes"),
        ("FAMILIES_DIR", "{folder}", "mine.yaml: end is missing"),
    ],
)
def test_serve_refuses_a_wrong_configuration(name, text, says, tmp_path, monkeypatch, capsys):
    """One sentence, before vLLM's server is started."""
    (tmp_path / "mine.yaml").write_text("version: 1\nfamily: mine\nstart: <a>\n")
    monkeypatch.setenv(f"MERIDIAN_PATCH_SET_{name}", text.format(folder=tmp_path))
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("a server was started"))
    monkeypatch.setattr("meridian_patch.serve.check_entry_point", lambda: None)
    code, printed = run(["serve", "model"], capsys)
    assert code == 1
    assert printed.err.startswith("meridian: ")
    assert says in printed.err
    assert "Traceback" not in printed.err


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
