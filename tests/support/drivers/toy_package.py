"""A small package on disk to patch, with every kind of binding a real one has."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from meridian_patch.patching.lock import Lock, Upstream, compute_entry
from meridian_patch.patching.registry import Registry, Reports
from meridian_patch.patching.source import SourceTree
from meridian_patch.patching.spec import Contract, Patch, Site

FILES = {
    "toy/__init__.py": "",
    "toy/base.py": '''
class Base:
    def finish(self, item):
        """Inherited by Engine."""
        self.finished = item
''',
    "toy/core.py": '''
from toy.base import Base

class Engine(Base):
    def __init__(self, size=1):
        self.size = size
        self.items = []

    def run(self, item, *, fast=False):
        """Take one item."""
        self.items.append(item)  # the newest last
        return item
''',
    "toy/turbo.py": """
from toy.core import Engine

class TurboEngine(Engine):
    def run(self, item, *, fast=True):
        return super().run(item, fast=fast)
""",
    "toy/user.py": """
from toy.core import Engine

class Factory:
    def make(self):
        return Engine()

    def make_turbo(self):
        from toy.turbo import TurboEngine

        return TurboEngine()
""",
    "toy/holder.py": "from toy.core import Engine as Held\n",
    "toy_build.py": """
calls = []

def build(original):
    calls.append(original)
    return type(f"Our{original.__name__}", (original,), {"__module__": __name__})

def fail(original):
    raise RuntimeError("no such luck")

def same(original):
    return original
""",
}
ENGINE_SITES = (Site("toy.core", "Engine"), Site("toy.user", "Engine"))
TURBO_SITE = Site("toy.turbo", "TurboEngine")
SITES = (*ENGINE_SITES, TURBO_SITE)

ENGINE = Patch(
    name="engine",
    sites=ENGINE_SITES,
    build="toy_build:build",
    versions=">=1.0,<2",
    contract=Contract(
        calls=("__init__", "run", "finish"),
        behaviour=("run",),
        reads=("finished", "items", "size"),
        lookups=("toy.user:Factory.make",),
        collaborators=(),
    ),
    process="any",
    why="a test",
    upstream="none: a test",
    remove_when="never",
)
TURBO = replace(
    ENGINE,
    name="turbo",
    sites=(TURBO_SITE,),
    contract=replace(
        ENGINE.contract, calls=("run",), behaviour=(), lookups=("toy.user:Factory.make_turbo",)
    ),
)
PATCHES = (ENGINE, TURBO)


@dataclass(frozen=True)
class Toy:
    """The package on disk and what is known of it.

    Attributes:
        upstream: the package in version 1.0.0, locked as it is.
    """

    upstream: Upstream

    def with_version(self, version: str) -> Upstream:
        return replace(self.upstream, version=version)

    def with_lock(self, lock: Lock) -> Upstream:
        return replace(self.upstream, lock=lock)


def module(site: Site) -> ModuleType:
    return importlib.import_module(site.module)


def bound(site: Site) -> type:
    """What the site's module holds now."""
    return vars(module(site))[site.attribute]


def bindings() -> list[type]:
    return [bound(site) for site in SITES]


@contextmanager
def toy_package(folder: Path) -> Iterator[Toy]:
    """Write the package, make it importable, and forget it again."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    tree = SourceTree.from_directory(folder / "toy")
    lock = {"1.0.0": compute_entry(tree, PATCHES)}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield Toy(Upstream("Toy", "1.0.0", folder / "toy", lock))
    finally:
        sys.path.remove(str(folder))
        for name in [
            each for each in sys.modules if each.partition(".")[0] in {"toy", "toy_build"}
        ]:
            del sys.modules[name]


@contextmanager
def applied(patches: Sequence[Patch], upstream: Upstream) -> Iterator[Reports]:
    """Apply patches for the length of a ``with`` block."""
    registry = Registry()
    reports = registry.apply(patches, upstream)
    try:
        yield reports
    finally:
        registry.undo()
