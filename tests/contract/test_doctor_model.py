"""Broken models and sources of vLLM: each finding names its cause and its fix."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from meridian_patch import envs
from meridian_patch.demo.tokenizer import save_tokenizer
from meridian_patch.engine.model_files import find_model
from meridian_patch.engine.upstream import installed_vllm
from meridian_patch.operate.doctor.finding import State
from meridian_patch.operate.doctor.model import check_model
from meridian_patch.operate.doctor.patches import check_binding, check_contracts
from meridian_patch.patches import PATCHES
from meridian_patch.patches.lock import load_lock
from meridian_patch.patching.source import installed_root

LOCK = load_lock()
ENTRY = LOCK[str(installed_vllm(LOCK).release)]


def findings_of(model, parser=None):
    findings = list(check_model(str(model), parser))
    for each in findings:
        assert each.state in (State.OK, State.SKIP) or (each.fix and each.expected)
    return {each.check: each for each in findings}


def write_model(directory: Path) -> Path:
    """A model without weights, of no family."""
    directory.mkdir(parents=True)
    save_tokenizer(directory)
    config = {"model_type": "qwen3", "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_healthy_model(demo_model):
    """Family, boundaries and what its chat template opens."""
    findings = findings_of(demo_model)
    assert {each.state for each in findings.values()} == {State.OK}
    assert findings["family"].found.startswith("tiny_reasoner, found by name")
    assert "start 256, end 257" in findings["think boundaries"].found
    assert findings["chat template"].found == "a prompt ends inside a thought"


def test_an_unknown_family(tmp_path):
    """Nothing would be scheduled by phase, and the fix names the two settings."""
    finding = findings_of(write_model(tmp_path / "acme-7b"))["family"]
    assert finding.state is State.WARN
    assert "single-phase" in finding.found
    assert "--reasoning-parser" in finding.fix
    assert "MERIDIAN_PATCH_SET_FAMILY" in finding.fix


def test_a_forced_family_that_no_file_describes(demo_model, monkeypatch):
    monkeypatch.setenv("MERIDIAN_PATCH_SET_FAMILY", "tiny_reasner")
    finding = findings_of(demo_model)["think boundaries"]
    assert finding.state is State.FAIL
    assert "did you mean tiny_reasoner?" in finding.found


def test_a_missing_tokenizer(tmp_path):
    """Named before transformers makes something up."""
    folder = write_model(tmp_path / "tiny-reasoner")
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    finding = findings_of(folder)["tokenizer"]
    assert finding.state is State.FAIL
    assert "tokenizer.json" in finding.found
    assert str(folder) in finding.fix


@pytest.mark.parametrize(
    ("name", "check"), (("config.json", "files"), ("tokenizer.json", "tokenizer"))
)
def test_files_that_are_cut_off(tmp_path, name, check):
    """A download that was interrupted; the fix is to repeat it."""
    folder = write_model(tmp_path / "tiny-reasoner")
    (folder / name).write_text('{"cut')
    finding = findings_of(folder)[check]
    assert finding.state is State.FAIL
    assert "download" in finding.fix


def test_a_name_that_is_not_cached(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = findings_of("owner/no-such-model")["files"]
    assert finding.state is State.FAIL
    assert "hf download owner/no-such-model" in finding.fix


def test_a_cached_name(tmp_path, monkeypatch):
    """A snapshot in the Hugging Face cache is found by its repository's name."""
    commit = "0" * 40
    repository = tmp_path / "models--acme--tiny-reasoner"
    snapshot = write_model(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_model("acme/tiny-reasoner") == snapshot
    assert findings_of("acme/tiny-reasoner")["family"].state is State.OK


def test_a_model_without_a_chat_template(tmp_path):
    folder = write_model(tmp_path / "tiny-reasoner")
    for path in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        if path.suffix == ".jinja":
            path.unlink(missing_ok=True)
        elif path.is_file():
            config = json.loads(path.read_text())
            config.pop("chat_template", None)
            path.write_text(json.dumps(config))
    finding = findings_of(folder)["chat template"]
    assert finding.state is State.WARN
    assert "--chat-template" in finding.fix


def test_the_installed_vllm_is_as_locked():
    finding = check_contracts(installed_root("vllm"), ENTRY)
    assert finding.state is State.OK
    assert f"{len(PATCHES)} patches" in finding.found


@pytest.fixture(scope="module")
def changed_sources(tmp_path_factory):
    """A part of the sources of vLLM: what the patches look for elsewhere is gone."""
    root = tmp_path_factory.mktemp("changed") / "vllm"
    shutil.copytree(
        installed_root("vllm") / "v1", root / "v1", ignore=shutil.ignore_patterns("__pycache__")
    )
    return root


def test_sources_that_are_not_those_of_the_lock(changed_sources):
    """What differs is named, and how to go on without the patches."""
    finding = check_contracts(changed_sources, ENTRY)
    assert finding.state is State.FAIL
    assert "vllm.config.scheduler has no class SchedulerConfig" in finding.found
    assert "MERIDIAN_PATCH=0" in finding.fix


def test_a_locked_parameter_that_differs():
    name = "vllm.v1.core.sched.scheduler:Scheduler"
    parameters = ENTRY[name]["parameters"] | {"schedule": "(self, other)"}
    entry = ENTRY | {name: ENTRY[name] | {"parameters": parameters}}
    finding = check_contracts(installed_root("vllm"), entry)
    assert finding.state is State.FAIL
    assert "Scheduler.schedule takes (" in finding.found
    assert "expected (self, other)" in finding.found


@pytest.mark.nightly
def test_patches_bind_in_a_process_of_their_own(tmp_path):
    """As in vLLM's processes, with a wrong variable of ours left to its own finding."""
    env = envs.given_environment() | {"MERIDIAN_PATCH_MOD": "x"}
    assert check_binding(env).state is State.OK


def test_an_interpreter_that_cannot_bind_them(tmp_path):
    """A process that ends early is a finding with its last words."""
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('no vLLM for you')")
    finding = check_binding({"PYTHONPATH": str(tmp_path)}, sys.executable)
    assert finding.state is State.FAIL
    assert "no vLLM for you" in finding.found
    assert check_binding({}, "/nowhere/python").state is State.FAIL
