"""The house rules that no type checker sees: who imports whom, and how big the rooms are."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meridian_patch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "meridian_patch"
KERNELS = ROOT / "triton_kernels"
BIN = Path(sys.executable).parent

# Room -> the rooms it may import. Read it top down: an arrow only points up the table.
PURE = ("errors", "envs", "config", "phase", "policy", "exit", "handoff")
ENGINE = (*PURE, "telemetry", "kernels", "patching", "engine")
PLUGIN = (*ENGINE, "patches_engine_core", "patches", "activation", "__init__", "apply", "plugin")
ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "kernels": (),
    "configs": (),
    "patching": ("errors",),
    "envs": ("errors",),
    "config": ("errors", "envs"),
    "phase": ("errors", "envs", "config"),
    "policy": ("errors", "envs", "config", "phase"),
    "exit": ("errors", "envs", "config", "phase"),
    "handoff": ("errors", "envs", "config"),
    "telemetry": PURE,
    "engine": ENGINE,
    "patches_engine_core": ("errors", "patching"),
    "patches": ("errors", "patching", "patches_engine_core"),
    "activation": ("errors", "envs"),
    "__init__": ("activation",),
    "apply": (*ENGINE, "patches"),
    "plugin": ("activation", "apply"),
    "replay": PLUGIN,
    "emulation": (*PLUGIN, "replay"),
    "demo": ("errors",),  # the tiny reasoner: weights, tokenizer, problems
    "bench": (*PLUGIN, "replay", "emulation", "demo"),
    "demo.run": (*PLUGIN, "emulation", "demo", "bench"),  # the front end of scripts/demo
    "serve_roles": ("errors", "config"),
    "serve": (*PLUGIN, "emulation", "serve_roles"),
    "operate": PLUGIN,
    "calibrate": (*PLUGIN, "replay", "bench"),
    "cli": (*PLUGIN, "demo", "bench", "serve", "operate", "calibrate"),
}
# Of an engine's processes, and of what plays on one.
USES_VLLM = {"engine", "replay", "emulation", "demo", "bench", "calibrate"}
MAX_LINES = 500


def modules() -> dict[str, Path]:
    """Every module of the installed package, by the name it is imported under."""
    found = {}
    for folder, prefix in ((PACKAGE, "meridian_patch"), (KERNELS, "meridian_patch.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((prefix, *parts)).removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    """The row of ROOMS that a dotted name belongs to; "" when there is none."""
    parts = module.split(".")[1:]
    candidates = (".".join(parts[:2]), parts[0] if parts else "__init__")
    return next((room for room in candidates if room in ROOMS), "")


def imported(path: Path, module: str) -> Iterator[str]:
    """Dotted names that a file imports, at any depth of nesting; relative ones resolved."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            # `from a import b` may name the module a.b or something inside a.
            yield from (f"{source}.{alias.name}" for alias in node.names)


def own_rooms(path: Path, module: str) -> set[str]:
    ours = [name for name in imported(path, module) if name.split(".")[0] == "meridian_patch"]
    # A name that is no room stands in the package's own __init__, such as __version__.
    return {room_of(name) or "__init__" for name in ours}


@pytest.mark.parametrize("module", modules())
def test_imports_run_one_way(module: str) -> None:
    """A module imports only rooms above its own."""
    room = room_of(module)
    assert room, f"{module}: add the new room to ROOMS"
    wrong = own_rooms(modules()[module], module) - {*ROOMS[room], room}
    assert not wrong, f"{module} must not import {sorted(wrong)}"


def test_table_has_no_way_back() -> None:
    """No room is reachable from a room that it may import."""
    above: list[str] = []
    for room, allowed in ROOMS.items():
        others = set(allowed) - {room}
        assert others <= set(above), f"{room} points down to {sorted(others - set(above))}"
        above.append(room)


def test_decisions_do_without_vllm() -> None:
    """`import vllm` stands where an engine is served, replayed or measured, and nowhere else."""
    users = {
        module
        for module, path in modules().items()
        if any(name.split(".")[0] == "vllm" for name in imported(path, module))
    }
    assert users, "no module imports vllm: this check looks in the wrong place"
    assert {room_of(module).partition(".")[0] for module in users} <= USES_VLLM, sorted(users)


@pytest.mark.slow
def test_unit_and_property_tests_need_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/test --pure` can import them where there is no vLLM."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", "-p", "without_vllm"]
    run = subprocess.run(
        [*command, "tests/unit", "tests/property"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def test_only_envs_touches_the_environment() -> None:
    """The environment is read and written in envs.py alone."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    users = set()
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            is_attribute = isinstance(node, ast.Attribute) and node.attr in names
            if is_attribute and isinstance(node.value, ast.Name) and node.value.id == "os":
                users.add(module)
        if any(name in {f"os.{n}" for n in names} for name in imported(path, module)):
            users.add(module)
    assert users == {"meridian_patch.envs"}


def test_rooms_are_small() -> None:
    """No file is over 500 lines; there is no lower bound."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    scripts = {path for path in (ROOT / "scripts").iterdir() if path.is_file()}
    scripts |= {*(ROOT / "scripts").rglob("*.py")}
    lines = {p: len(p.read_text().splitlines()) for p in (*modules().values(), *tests, *scripts)}
    too_long = {str(p.relative_to(ROOT)): n for p, n in lines.items() if n > MAX_LINES}
    assert not too_long


def test_package_is_this_checkout() -> None:
    """The tests import this checkout, as a regular package whose __init__ has run.

    An editable install made while an __init__.py was missing serves the package without it.
    """
    assert Path(str(meridian_patch.__file__)) == PACKAGE / "__init__.py"


def test_kernels_import_under_our_name() -> None:
    """The folder triton_kernels is importable as meridian_patch.kernels."""
    kernels = importlib.import_module("meridian_patch.kernels")
    assert Path(str(kernels.__file__)) == KERNELS / "__init__.py"


# Runs at interpreter start through PYTHONPATH, and at exit records what vLLM's probe would find.
PROBE = """
import atexit, importlib.util, pathlib
def record():
    spec = importlib.util.find_spec("triton_kernels")
    where = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    pathlib.Path({record!r}).write_text("\\n".join(map(str, where)))
atexit.register(record)
"""


def run_from_root(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120
    )


def found_by(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, ...]:
    """Where a command run from the repository root finds `triton_kernels`."""
    record = tmp_path / "found"
    (tmp_path / "sitecustomize.py").write_text(PROBE.format(record=str(record)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    run = run_from_root(command)
    assert run.returncode == 0, run.stdout + run.stderr
    return tuple(Path(line) for line in record.read_text().splitlines())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-P", "-c", "import meridian_patch"], id="python -P"),
        pytest.param([str(BIN / "pytest"), "--collect-only", "-q", __file__], id="pytest"),
        pytest.param([str(BIN / "meridian"), "--help"], id="meridian"),
        pytest.param(
            [sys.executable, "-P", "-m", "meridian_patch.demo.run", "--help"], id="scripts/demo"
        ),
        pytest.param(
            [sys.executable, "-P", "scripts/lab/gpu_suite/command.py", "--help"],
            id="scripts/gpu_suite",
        ),
        pytest.param(
            [sys.executable, "-P", "scripts/lab/marathon/command.py", "--help"],
            id="scripts/marathon",
        ),
        pytest.param(
            [sys.executable, "-P", "scripts/lab/benches.py", "--help"], id="scripts/lab/benches.py"
        ),
        pytest.param(
            [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", __file__],
            id="scripts/test",
        ),
    ],
)
def test_vllm_never_finds_our_kernels(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run from the repository root, no documented command makes `triton_kernels` ours."""
    found = found_by(command, tmp_path, monkeypatch)
    assert not [path for path in found if path.is_relative_to(KERNELS)]


def test_probe_sees_a_leaked_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without -P the root is on sys.path and the same probe finds our folder."""
    found = found_by([sys.executable, "-c", "pass"], tmp_path, monkeypatch)
    assert KERNELS / "__init__.py" in found


def test_guard_refuses_the_bare_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing our folder as `triton_kernels` fails with a sentence that says what to do."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    run = run_from_root([sys.executable, "-c", "import triton_kernels"])
    assert run.returncode == 1
    assert "ImportError: this folder is installed as meridian_patch.kernels" in run.stderr
    assert "Take the repository root off sys.path" in run.stderr
