"""`scripts/setup`: the build it installs is the build that it was asked for."""

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent

# Stands in for .venv/bin/python: notes what pip is asked for, and answers for torch.
PYTHON = """#!/bin/sh
case "$*" in
*pip*) echo "$@" >> "{calls}" ;;
*torch*) {answer} ;;
esac
"""


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module that works in a folder of its own."""
    loader = SourceFileLoader("meridian_setup", str(ROOT / "scripts" / "setup"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("")
    for name, path in {
        "ROOT": tmp_path,
        "VENV": venv,
        "PYTHON": venv / "bin" / "python",
        "STAMP": venv / "meridian-setup",
        "LOG": tmp_path / "out" / "setup.log",
    }.items():
        monkeypatch.setattr(module, name, path)
    return module


# Of pip, whose index has no CPU build of torch.
WITHOUT_TORCH = """#!/bin/sh
echo "$@" >> "{calls}"
case "$*" in
*--extra-index-url*) {answer} ;;
*cpu,bench*) false ;;
esac || {{ echo "ERROR: No matching distribution found for torch==2.13.0+cpu"; exit 1; }}
"""


def install(
    setup: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    answer: str,
    python: str = PYTHON,
) -> list[str]:
    """Run the script with a pretended interpreter; returns the calls of pip."""
    calls = setup.ROOT / "calls"
    setup.PYTHON.write_text(python.format(calls=calls, answer=answer))
    setup.PYTHON.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["setup", flag])
    setup.main()
    return calls.read_text().splitlines()


def test_a_cuda_build_is_accepted(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set-up is complete, and a second run does nothing."""
    (call,) = install(setup, monkeypatch, "--cuda", "echo 2.13.0+cu130 13.0")
    assert call.endswith("[cuda,bench,dev]")
    build, digest = setup.read_stamp()
    assert build == "cuda"
    assert digest == setup.pyproject_digest("cuda")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo 2.13.0+cpu None", "is 2.13.0+cpu with torch.version.cuda None"),
        (
            "echo 'ImportError: libcudart' >&2; exit 1",
            "cannot be imported (ImportError: libcudart)",
        ),
    ],
)
def test_another_build_of_torch_is_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, answer: str, said: str
) -> None:
    """One sentence: what is there, what was expected, what to do. The set-up stays unfinished."""
    with pytest.raises(SystemExit) as ended:
        install(setup, monkeypatch, "--cuda", answer)
    message = str(ended.value.code)
    assert said in message
    assert "expected a build for CUDA" in message
    assert "scripts/setup --cpu" in message
    assert "\n" not in message
    assert setup.read_stamp()[1] == "unfinished"


def test_the_cpu_build_needs_no_cuda(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU build is installed, and what only the CUDA build can use is removed."""
    calls = install(setup, monkeypatch, "--cpu", "echo 2.13.0+cpu None")
    assert [call.split()[4] for call in calls] == ["install", "uninstall"]


def test_a_cpu_build_of_torch_that_no_configured_index_has_comes_from_pytorchs(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unconfigured pip asks PyPI, which has no CPU build."""
    first, second, last = install(setup, monkeypatch, "--cpu", "true", WITHOUT_TORCH)
    assert second == f"{first} --extra-index-url {setup.CPU_INDEX}"
    assert "uninstall" in last
    assert setup.read_stamp()[0] == "cpu"


def test_an_index_that_cannot_be_reached_is_named(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        install(setup, monkeypatch, "--cpu", "false", WITHOUT_TORCH)
    assert setup.CPU_INDEX in str(ended.value.code).splitlines()[-1]
    assert setup.read_stamp()[1] == "unfinished"


def test_the_question_is_one_that_torch_answers(setup: ModuleType) -> None:
    """The pretended interpreter above answers in the words of the real one."""
    probe = subprocess.run(
        [sys.executable, "-P", "-c", setup.TORCH_FACTS],
        check=True,
        capture_output=True,
        text=True,
    )
    assert probe.stdout.split() == [torch.__version__, str(torch.version.cuda)]
