"""The house rules that no type checker sees: who imports whom, and how big the rooms are."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from attribute_stores import Module, Store, declared_callbacks

import meridian_patch
from meridian_patch.engine import wire
from meridian_patch.patches import REBINDINGS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "meridian_patch"
KERNELS = ROOT / "triton_kernels"
BIN = Path(sys.executable).parent

# Room -> the rooms it may import. Read it top down: an arrow only points up the table.
PURE = ("errors", "envs", "config", "phase", "policy", "exit", "engine.wire", "handoff")
ENGINE = (*PURE, "telemetry", "kernels", "patching", "engine")
PLUGIN = (*ENGINE, "patches", "activation", "__init__", "apply", "plugin")
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
    "engine.wire": (),  # names alone, also of what goes from engine to engine
    "handoff": ("errors", "envs", "config", "engine.wire"),
    "telemetry": PURE,
    "engine": ENGINE,
    "patches": ("errors", "patching"),
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


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed source of a module, which most tests here look at."""
    return ast.parse(path.read_text())


@cache
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
    for node in ast.walk(tree_of(path)):
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


# Constants of wire.py, by their names there.
RIDER_NAMES = {
    name: value
    for name, value in vars(wire).items()
    if name[0].isupper() and isinstance(value, str)
}


def served_modules() -> dict[str, Path]:
    """Modules of the serving path, but the transaction that applies the patches."""
    rooms = {*PLUGIN, "serve", "serve_roles"} - {"patching"}
    return {module: path for module, path in modules().items() if room_of(module) in rooms}


def stores_in(sources: dict[str, str]) -> list[Store]:
    """Assignments of attributes of others in modules of ours, given their sources by name."""
    callbacks = declared_callbacks(list(sources.values()))
    return [
        store
        for name, text in sources.items()
        for store in Module(name, text, RIDER_NAMES, callbacks).stores()
    ]


def literals_of_riders(text: str) -> set[str]:
    """Strings of a source that name a rider, or look like one; those in docstrings are longer."""
    strings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    # The bare word is the product's name, too.
    names = {*RIDER_NAMES.values()} - {wire.SUMMARY}
    return {
        each
        for each in strings
        if isinstance(each, str) and (each in names or re.fullmatch(r"meridian_\w+", each))
    }


def test_names_of_riders_stand_in_one_place() -> None:
    """What travels on vLLM's objects is named in wire.py alone."""
    found = {
        module: literals_of_riders(path.read_text())
        for module, path in served_modules().items()
        if room_of(module) == "engine"
    }
    wrong = {module: names for module, names in found.items() if names}
    assert not wrong, f"name it in engine/wire.py: {wrong}"


def test_a_planted_name_of_a_rider_is_found() -> None:
    """As an attribute of an output, and as a key; not as a text that holds it."""
    assert literals_of_riders("setattr(output, 'meridian_new', 1)") == {"meridian_new"}
    assert literals_of_riders("params = {**params, 'meridian_plan': 1}") == {"meridian_plan"}
    assert not literals_of_riders("why = 'field meridian_exit is wrong'")


def test_table_of_riders_is_complete() -> None:
    """Each name of wire.py is used by the modules that the table says, and by no others."""
    named = {value: set[str]() for value in RIDER_NAMES.values()}
    for rider in wire.RIDERS:
        if rider.name in named:
            named[rider.name] |= {*rider.writers, *rider.readers}
        for module in (*rider.writers, *rider.readers):
            assert f"meridian_patch.{module}" in modules(), f"{rider.name}: there is no {module}"
    found = {value: set[str]() for value in RIDER_NAMES.values()}
    for module, path in modules().items():
        if module != wire.__name__:
            nodes = ast.walk(tree_of(path))
            used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
            used |= {name.removeprefix("meridian_patch.engine.") for name in imported(path, module)}
            for name, value in RIDER_NAMES.items():
                if f"wire.{name}" in used:
                    found[value].add(module.removeprefix("meridian_patch."))
    assert found == named


def test_engine_code_asks_one_accessor_of_the_configuration() -> None:
    """Engine code calls ``process_config``; commands may load a file, or another environment."""
    load = "meridian_patch.config.load.load_config"
    users = {module for module, path in modules().items() if load in imported(path, module)}
    assert users, "no module loads a configuration: this check looks in the wrong place"
    wrong = [module for module in users if room_of(module) in {"engine", "apply", "plugin"}]
    assert not wrong, f"call process_config instead: {wrong}"


DECLARED = {
    (place, attribute)
    for rebinding in REBINDINGS
    for place in rebinding.places
    for attribute in rebinding.attributes
}


def test_every_rebinding_is_declared() -> None:
    """What vLLM's objects and modules are given in place of their own code is in patches/."""
    found = stores_in({name: path.read_text() for name, path in served_modules().items()})
    rebound = {(store.place, store.attribute) for store in found if store.rebinds}
    assert rebound, "nothing is rebound: this check looks in the wrong place"
    assert rebound <= DECLARED, f"declare in patches/: {sorted(rebound - DECLARED)}"
    stored = {(store.place, store.attribute) for store in found}
    assert stored >= DECLARED, f"not done there any more: {sorted(DECLARED - stored)}"


PLANTED = (
    "def put(runner):\n    runner.sample = lambda *args: None",
    "def put(runner):\n    def ours(): ...\n    runner.sample = ours",
    "def put(runner):\n    runner.sample = functools.partial(runner.sample, 1)",
    (
        "def put(runner):\n    runner.sample, runner.other = wrapped(runner.sample), 1\n"
        "def wrapped(inner):\n    def call(): ...\n    return call"
    ),
    "def put(sampler):\n    sampler.__class__ = type('Ours', (type(sampler),), {})",
    "class Ours: ...\ndef put(module):\n    module.Scheduler = Ours",
    "def put(module, ours):\n    vars(module)['Scheduler'] = ours",
    (
        "from meridian_patch.engine.worker.worker import put_tap\n"
        "def put(module):\n    module.put = put_tap"
    ),
    (
        "from vllm.v1.core.sched.scheduler import Scheduler\n"
        "def put(ours):\n    Scheduler.schedule = ours"
    ),
    (
        "from vllm.v1.core.sched import scheduler\n"
        "def put(ours):\n    setattr(scheduler, 'Scheduler', ours)"
    ),
    (
        "class Watch:\n    def put(self):\n        self.manager.free = self.freed\n"
        "    def freed(self): ..."
    ),
    (
        "def build(original):\n    class Ours(original):\n        def put(self):\n"
        "            self.free = self.freed\n        def freed(self): ..."
    ),
)


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_rebinding_is_found(text: str) -> None:
    """A function, a class or a method of ours, bound by any of the ways that Python has."""
    assert [store for store in stores_in({"planted": text}) if store.rebinds]


@pytest.mark.parametrize(
    "text",
    [
        "def put(request):\n    request.max_tokens = 3",
        "def put(output, plan):\n    setattr(output, 'meridian_plan', plan)",
        (
            "class Close:\n    gave_up: Callable[[], None]\n"
            "class Part:\n    def put(self, close):\n        close.gave_up = self.refused\n"
            "    def refused(self): ..."
        ),
    ],
)
def test_data_and_callbacks_of_ours_are_no_rebinding(text: str) -> None:
    """Fields of requests and outputs, and what our own classes declare as a callback."""
    assert not [store for store in stores_in({"planted": text}) if store.rebinds]


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
        for node in ast.walk(tree_of(path)):
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
