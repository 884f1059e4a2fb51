"""The engine tests' support replaces nothing where CUDA is available, so that they test CUDA."""

import sys
from pathlib import Path
from types import SimpleNamespace

import cpu_engine
import pytest
import torch
from run_engine import Job, job_environment

NAMES = ("Event", "Stream", "stream", "current_stream")
V2 = Job([], model_runner_v2=True)


class Platform:
    """Switches asynchronous scheduling off, as vLLM's CPU platform does."""

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        vllm_config.scheduler_config.async_scheduling = False


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Says whether CUDA is available, and takes back what is replaced."""
    for name in NAMES:
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    monkeypatch.setitem(sys.modules, "vllm.platforms.cpu", SimpleNamespace(CpuPlatform=Platform))
    original = Platform.__dict__["check_and_update_config"]
    monkeypatch.setattr(Platform, "check_and_update_config", original)
    return lambda has_cuda: monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)


def replaced(before: dict[str, object]) -> set[str]:
    return {name for name in NAMES if getattr(torch.cuda, name) is not before[name]}


@pytest.mark.parametrize("has_cuda", [False, True])
def test_events_and_streams(has_cuda: bool, machine) -> None:
    machine(has_cuda)
    before = {name: getattr(torch.cuda, name) for name in NAMES}
    cpu_engine.allow_async_scheduling()
    assert replaced(before) == (set() if has_cuda else set(NAMES))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
    Platform.check_and_update_config(config)
    assert config.scheduler_config.async_scheduling is not has_cuda


@pytest.mark.parametrize("has_cuda", [False, True])
def test_triton_backends(has_cuda: bool, machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stand-in for a CPU among Triton's backends, and no change of its interpreter."""
    machine(has_cuda)
    known: dict[str, object] = {}
    backends = SimpleNamespace(backends=known, Backend=SimpleNamespace)
    builder = SimpleNamespace(create_masked_load=None, create_masked_store=None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(backends=backends))
    interpreter = SimpleNamespace(InterpreterBuilder=builder)
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", interpreter)
    cpu_engine.add_triton_cpu_backend()
    assert set(known) == (set() if has_cuda else {"cpu"})
    assert (builder.create_masked_load is None) is has_cuda


@pytest.mark.parametrize("has_cuda", [False, True])
def test_interpreter_is_for_machines_without_cuda(has_cuda: bool, machine, tmp_path: Path) -> None:
    machine(has_cuda)
    env = job_environment(V2, tmp_path)
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert ("TRITON_INTERPRET" in env) is not has_cuda


@pytest.mark.parametrize("has_cuda", [False, True])
def test_runner_is_the_one_asked_for(has_cuda: bool, machine, tmp_path: Path) -> None:
    """On CUDA vLLM takes runner V2 where it is not told which."""
    machine(has_cuda)
    assert job_environment(Job([]), tmp_path)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
