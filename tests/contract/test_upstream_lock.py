"""Drift guard: where the patches touch vLLM, the installed release is what was locked.

Guarded:

* parameters of every method that is overridden or called;
* bodies of every method whose behaviour is relied on, by hash: a new hash means that a person
  reads the difference before the lock is renewed;
* instance attributes that are read: assigned by the class or its bases;
* that the replaced names are read each time an engine is built, not bound at import;
* which other vLLM modules bind the replaced names when they are imported;
* that every locked release has all of this, those included that are not installed here.

Not guarded, and why:

* what methods return: the noop differential test compares whole outputs instead;
* bodies that the relied-on methods call in turn: too many, and most changes there mean nothing
  to us; the engine tests see what matters;
* attributes of requests and of scheduler outputs: they are read by tests that run the real
  scheduler, which fail when one is gone;
* classes that users derive from a patched class before the patches are applied: only the user's
  process knows them. The report lists them as stale bindings;
* releases that are not installed here, beyond their source files: the 0.33 build for CUDA cannot
  be imported on a machine without its driver.
"""

import ast
import importlib.util
import json
import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from meridian_patch.patches import PATCHES
from meridian_patch.patches.lock import LOCKED_VERSIONS, SUPPORTED, load_lock
from meridian_patch.patching.lock import (
    LockedMethod,
    compute_entry,
    locked_methods,
    reads_a_site,
)
from meridian_patch.patching.source import SourceTree, installed_root
from meridian_patch.patching.spec import Patch, Site

ROOT = Path(__file__).resolve().parent.parent.parent


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def update_lock() -> ModuleType:
    return load_script("update_lock")


@pytest.fixture(scope="module")
def installed() -> SourceTree:
    return SourceTree.from_directory(installed_root("vllm"))


def test_lock_of_the_installed_release_is_fresh(
    installed: SourceTree, update_lock: ModuleType
) -> None:
    """Recomputing the installed release's entry gives the stored one."""
    version = update_lock.read_version(installed)
    assert version in LOCKED_VERSIONS, "run python scripts/update_lock.py --installed"
    assert compute_entry(installed, PATCHES) == load_lock()[version]


def test_version_read_from_sources_is_the_one_stated(
    installed: SourceTree, update_lock: ModuleType
) -> None:
    """The version in the files is the one that the imported package states."""
    import vllm

    assert update_lock.read_version(installed) == Version(vllm.__version__).public


@pytest.mark.parametrize("version", LOCKED_VERSIONS)
def test_every_locked_release_covers_the_contracts(version: str) -> None:
    """An entry holds every method and attribute that a contract names, and nothing else."""
    entry = load_lock()[version]
    wanted = {method for patch in PATCHES for method in locked_methods(patch)}
    held = {
        LockedMethod(owner, kind, name)
        for owner, locked in entry.items()
        for kind in ("parameters", "source")
        for name in locked[kind]
    }
    assert held == wanted
    for patch in PATCHES:
        assert entry[str(patch.definition)]["attributes"] == sorted(patch.contract.reads)


def test_locked_releases_are_supported_and_both_are_there() -> None:
    """Every locked release lies in the supported range; 0.32.0 and 0.33.0 are locked."""
    assert all(version in SpecifierSet(SUPPORTED) for version in LOCKED_VERSIONS)
    assert {"0.32.0", "0.33.0"} <= set(LOCKED_VERSIONS)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_replaced_name_is_read_at_call_time(installed: SourceTree, patch: Patch) -> None:
    """Some declared lookup reads a site's name each time it runs, so rebinding takes effect.

    The lock's script refuses a release where none does, so this holds for all that are locked.
    """
    assert reads_a_site(installed, patch)


def bound_at_import(text: str, sites: list[Site]) -> set[str]:
    """Of the sites' names those that a module binds as it is imported, type checking apart."""
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name
        for node in imports
        for alias in node.names
        for site in sites
        if alias.name == site.attribute
        and (
            node.module == site.module
            or (node.level and node.module == site.module.rpartition(".")[2])
        )
    }


def test_no_other_module_binds_the_replaced_names() -> None:
    """The only modules that bind a replaced name at import derive their own class from it.

    A new one must become a site of the patch, or be shown to need none.
    """
    root = installed_root("vllm")
    sites = [site for patch in PATCHES for site in patch.sites]
    stems = {site.module.rpartition(".")[2] for site in sites}
    importing = re.compile(rf"^from [\w.]*\b(?:{'|'.join(stems)}) import".encode(), re.MULTILINE)
    found = set()
    for path in root.rglob("*.py"):
        data = path.read_bytes()
        if importing.search(data):
            module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            found |= {(module, name) for name in bound_at_import(data.decode(), sites)}
    declared = {(site.module, site.attribute) for site in sites}
    assert found - declared == {
        ("vllm.v1.core.sched.async_scheduler", "Scheduler"),
        ("vllm.v1.core.sched.diffusion_scheduler", "Scheduler"),
        ("vllm.v1.core.sched.diffusion_scheduler", "AsyncScheduler"),
        # Derives the worker from it, and is imported when the plug-ins are loaded.
        ("vllm.v1.worker.gpu_worker", "WorkerBase"),
        # Imported by Ray Serve applications only; StatLoggerManager tests for our class.
        ("vllm.v1.metrics.ray_wrappers", "PrometheusStatLogger"),
        # Endpoints of their own: refused by the input processor, and without the summary.
        ("vllm.entrypoints.anthropic.serving", "OpenAIServingChat"),
        ("vllm.entrypoints.cohere.serving", "OpenAIServingChat"),
        ("vllm.entrypoints.openai.chat_completion.batch_serving", "OpenAIServingChat"),
    }


def test_script_locks_a_wheel_it_cannot_import(
    installed: SourceTree,
    update_lock: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From a wheel of source files alone the script writes an entry, and says what is new."""
    wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    modules = {
        "vllm",
        "vllm.v1.core.sched.interface",
        "vllm.entrypoints.generate.base.serving",
        "vllm.entrypoints.serve.engine.serving",
        *(owner.partition(":")[0] for owner in load_lock()[LOCKED_VERSIONS[0]]),
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in modules:
            module = installed.module(name)
            path = name.replace(".", "/") + ("/__init__.py" if module.is_package else ".py")
            archive.writestr(path, "\n".join(module.lines))
        archive.writestr("vllm/_version.py", "__version__ = version = '9.9.9+cu130'\n")
    target = tmp_path / "lock.json"
    monkeypatch.setattr(update_lock, "LOCK_PATH", target)
    assert update_lock.main(["--wheel", str(wheel)]) == 0
    written = json.loads(target.read_text())
    assert list(written) == [*LOCKED_VERSIONS, "9.9.9"]
    entry = compute_entry(installed, PATCHES)
    assert written["9.9.9"] == entry
    before = load_lock()[LOCKED_VERSIONS[-1]]
    said = capsys.readouterr().out
    assert f"different from {LOCKED_VERSIONS[-1]}:\n" in said
    assert said.splitlines()[2:] == [f"  {line}" for line in update_lock.differences(before, entry)]


def test_what_differs_between_releases_is_named(update_lock: ModuleType) -> None:
    """Changed and new methods, by owner; attributes and what is equal are left out."""
    before = {"m:A": {"parameters": {"f": "(a)", "g": "()"}, "source": {"f": "1"}}}
    after = {
        "m:A": {"parameters": {"f": "(b)", "g": "()"}, "source": {"f": "1"}},
        "m:B": {"parameters": {}, "source": {"h": "2"}},
    }
    assert update_lock.differences(before, after) == ["m:A parameters: f", "m:B source: h"]
    assert update_lock.differences(before, before) == ["nothing"]


def test_script_refuses_what_is_not_vllm(
    update_lock: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wheel without vLLM in it, or no file at all, is an error and writes nothing."""
    monkeypatch.setattr(update_lock, "LOCK_PATH", tmp_path / "lock.json")
    wheel = tmp_path / "other.whl"
    zipfile.ZipFile(wheel, "w").close()
    assert update_lock.main(["--wheel", str(wheel)]) == 1
    assert "vllm/_version.py" in capsys.readouterr().err
    assert update_lock.main(["--wheel", str(tmp_path / "gone.whl")]) == 1
    assert not (tmp_path / "lock.json").exists()
