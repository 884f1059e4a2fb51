"""A model is found on this machine alone; where it is not, one sentence says what to do."""

from pathlib import Path

import pytest

from meridian_patch import cli
from meridian_patch.engine.model_files import describe_missing, find_model, model_name

NAME = "acme/think-8b"
COMMIT = "0" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, and no way to a network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", no_network)
    return tmp_path


def no_network(*_: object) -> None:
    raise AssertionError("a network was asked")


def write_snapshot(cache: Path) -> Path:
    repository = cache / "models--acme--think-8b"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_cached_name_is_its_snapshot(cache: Path) -> None:
    snapshot = write_snapshot(cache)
    assert find_model(NAME) == snapshot
    assert model_name(snapshot) == NAME


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    assert model_name(tmp_path / "think-8b") == "think-8b"


@pytest.mark.parametrize("model", [NAME, "/none/such", "think-8b"])
def test_what_is_not_here_is_not_downloaded(cache: Path, model: str) -> None:
    del cache
    assert find_model(model) is None


def test_the_sentence_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happened, what was expected, and the command that mends it."""
    monkeypatch.chdir(tmp_path)
    assert describe_missing(NAME) == (
        f"model {NAME} is not in the Hugging Face cache of this machine; expected it there, "
        f"because this command downloads nothing; run 'hf download {NAME}', or name a directory "
        "with config.json and the tokenizer's files"
    )


def test_the_sentence_for_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose first part is a folder here is a directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme").mkdir()
    for model in (NAME, "/none/such", "think-8b"):
        assert describe_missing(model).startswith(f"model directory {model} does not exist")


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "serve", "--model", NAME],
        ["calibrate", "--model", NAME, "--data", "problems.jsonl"],
    ],
)
def test_a_command_says_it_in_one_line(
    command: list[str],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 1 and no traceback; `boundaries` in tests/contract/test_boundaries_command.py."""
    monkeypatch.chdir(cache)
    lines = [f'{{"prompt": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(3)]
    (cache / "problems.jsonl").write_text("".join(lines))
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert printed == f"meridian: {describe_missing(NAME)}\n"
