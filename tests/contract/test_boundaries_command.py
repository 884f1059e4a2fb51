"""`meridian boundaries`: what it prints for real model directories."""

import json
from pathlib import Path

import pytest

from meridian_patch.demo.tokenizer import save_tokenizer
from meridian_patch.engine.boundaries_command import run
from meridian_patch.errors import BoundaryError, ConfigError


@pytest.fixture
def model_dir(tmp_path):
    """Writes a model directory: config.json and a tokenizer, no weights."""

    def write(name, architecture="LlamaForCausalLM", tokenizer=True, model_type="qwen3"):
        directory = tmp_path / name
        directory.mkdir()
        if tokenizer:
            save_tokenizer(directory)
        config = {"model_type": model_type, "architectures": [architecture]}
        (directory / "config.json").write_text(json.dumps(config))
        return str(directory)

    return write


def test_table(model_dir, capsys):
    """A reader sees family, file, strings, ids, tokens, provenance and history rule."""
    assert run(model_dir("tiny-reasoner"), None, None, as_json=False) == 0
    text = capsys.readouterr().out
    for part in (
        "tiny_reasoner",
        "*tiny-reasoner*",
        "verified",
        "strip",
        "'</think>'",
        "257",
        "same",
        "close",
    ):
        assert part in text


def test_json(model_dir, capsys):
    """The same facts for programs."""
    run(model_dir("tiny-reasoner"), "qwen3", None, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert (report["family"], report["history"], report["phases"]) == ("tiny_reasoner", "strip", 2)
    assert report["file"].endswith("tiny_reasoner.yaml")
    start, end, implicit, close = report["markers"]
    assert (start["ids"], start["tokens"]) == ([[256]], [["<think>"]])
    assert end["is_as_documented"] is True
    assert implicit["text"] == "<tool_call>"
    assert implicit["origin"] == "--reasoning-parser qwen3"
    # The parser also knows turns that this vocabulary has no tokens for.
    assert report["turn_start"] == ["<|system|>", "<|user|>", "<|assistant|>"]
    assert (close["field"], close["text"], close["ids"]) == ("close", "</think>", [[257]])


def test_architecture_that_transformers_does_not_know(model_dir, capsys):
    """New models are checked before transformers knows them."""
    run(model_dir("x", "Step3p5ForCausalLM"), None, None, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["found_by"] == "architecture: Step3p5ForCausalLM"
    assert report["markers"][-1]["text"] == "\n</think>\n"


def test_differing_ids_are_shown(model_dir, capsys):
    """Ids that were not verified are shown beside those of the tokenizer."""
    run(model_dir("x"), None, "qwq_32b", as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "differs: 151667" in text
    assert "warning" in text


def test_marker_that_is_no_token_is_pointed_out(model_dir, capsys):
    """A parser of another model would be followed in plain text: the reader is told."""
    run(model_dir("x"), "seed_oss", None, as_json=True)
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert len(warnings) == 2
    assert "'<seed:think>'" in warnings[0]
    assert "is no vocabulary entry" in warnings[0]


def test_single_phase(model_dir, capsys):
    """A model that nothing is known about is no error; the answer says what to set."""
    assert run(model_dir("x"), None, None, as_json=False) == 0
    assert "single-phase" in capsys.readouterr().out
    run(str(model_dir("y")), None, None, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["phases"] == 1
    assert "--reasoning-parser" in report["why"]


@pytest.mark.parametrize(
    ("parser", "family", "error", "part"),
    [
        (None, "tiny_raesoner", ConfigError, "did you mean tiny_reasoner?"),
        ("minimax_m3", None, BoundaryError, "--reasoning-parser minimax_m3 cannot be used"),
        ("none_such", None, BoundaryError, "Available parsers"),
        (None, "deepseek_r1", BoundaryError, "deepseek_r1.yaml"),
    ],
)
def test_wrong_options(model_dir, parser, family, error, part):
    """A wrong option is one error that says what is wrong with it."""
    with pytest.raises(error) as raised:
        run(model_dir("x"), parser, family, as_json=False)
    assert part in str(raised.value)


def test_a_cached_name(model_dir, tmp_path, monkeypatch, capsys):
    """A snapshot of the Hugging Face cache is found by its repository's name."""
    repository, commit = tmp_path / "models--acme--tiny-reasoner", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    Path(model_dir("written")).rename(repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert run("acme/tiny-reasoner", None, None, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["family"]) == ("acme/tiny-reasoner", "tiny_reasoner")


def test_missing_directory():
    """A directory that does not exist is named."""
    with pytest.raises(BoundaryError, match="model directory /none/such does not exist"):
        run("/none/such", None, None, as_json=False)


def test_a_name_that_is_not_cached(tmp_path, monkeypatch):
    """Nothing is downloaded without a word: the sentence names the command that does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BoundaryError, match="run 'hf download acme/think-8b'"):
        run("acme/think-8b", None, None, as_json=False)


@pytest.mark.parametrize(
    ("model_type", "part"),
    [("qwen3", "cannot encode any text"), ("none_such", "has no usable tokenizer")],
)
def test_directory_without_tokenizer(model_dir, model_type, part):
    """A directory without a tokenizer is named, also where transformers makes an empty one."""
    directory = model_dir("x", tokenizer=False, model_type=model_type)
    with pytest.raises(BoundaryError) as error:
        run(directory, None, None, as_json=False)
    assert directory in str(error.value)
    assert part in str(error.value)


def test_directory_without_config(model_dir):
    """A directory without config.json is named."""
    directory = model_dir("x")
    Path(directory, "config.json").unlink()
    with pytest.raises(BoundaryError) as error:
        run(directory, None, None, as_json=False)
    assert f"model directory {directory} has no config.json" in str(error.value)
