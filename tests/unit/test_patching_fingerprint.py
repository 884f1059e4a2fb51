"""Fingerprints from source text: what changes them, what does not, and where sources may lie."""

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from toy_package import ENGINE

from meridian_patch.patching import fingerprint
from meridian_patch.patching.lock import locked_methods, read_fingerprint, reads_a_site
from meridian_patch.patching.source import MethodSource, SourceTree, installed_root
from meridian_patch.patching.spec import Site

BASE = """
class Scheduler:
    def schedule(self, budget=1, *, strict=False):
        total = budget + 1
        return "# not a comment", total
"""


def tree(**modules: str) -> SourceTree:
    """A package `pkg` of the given modules."""
    files = {"pkg/__init__.py": ""} | {f"pkg/{name}.py": text for name, text in modules.items()}
    return SourceTree("pkg", files.get)


def method(text: str, name: str = "schedule") -> MethodSource:
    source = tree(core=text)
    return source.find_method(source.find_class("pkg.core", "Scheduler"), name)


def fingerprints(text: str) -> tuple[str, str]:
    found = method(text)
    return fingerprint.parameters(found), fingerprint.source_hash(found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("budget=1", "budget: int = 1", id="annotation"),
        pytest.param("strict=False)", "strict: bool = False) -> tuple", id="return annotation"),
        pytest.param("    total =", "    # adds one\n        total =", id="comment line"),
        pytest.param("budget + 1", "budget + 1  # one more", id="comment at the end"),
        pytest.param("        total =", '        """Docs."""\n        total =', id="docstring"),
        pytest.param("        return", "\n\n        return", id="blank lines"),
        pytest.param("budget + 1\n", "budget + 1   \n", id="trailing spaces"),
        pytest.param(", budget", ",\n        budget", id="parameters on two lines"),
    ],
)
def test_noise_changes_nothing(old: str, new: str) -> None:
    """What means nothing to a subclass leaves both fingerprints as they are."""
    assert old in BASE
    assert fingerprints(BASE.replace(old, new)) == fingerprints(BASE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("budget=1", "budget=2", id="default"),
        pytest.param("budget=1", "budget", id="no default"),
        pytest.param("budget=1", "limit=1", id="name"),
        pytest.param("budget=1, *,", "budget=1,", id="kind"),
        pytest.param("strict=False", "strict=False, more=None", id="parameter"),
        pytest.param("def schedule", "async def schedule", id="async"),
        pytest.param("    def schedule", "    @staticmethod\n    def schedule", id="static"),
    ],
)
def test_parameters_tell_every_change_of_a_call(old: str, new: str) -> None:
    """A new default, name, kind, parameter or calling convention changes the parameters."""
    assert old in BASE
    assert fingerprints(BASE.replace(old, new))[0] != fingerprints(BASE)[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("budget + 1", "budget + 2", id="expression"),
        pytest.param("# not a comment", "# not a remark", id="hash sign in a string"),
        pytest.param("return", "yield", id="keyword"),
    ],
)
def test_source_hash_tells_every_change_of_a_body(old: str, new: str) -> None:
    """A changed body changes the hash and not the parameters."""
    parameters, source = fingerprints(BASE.replace(old, new))
    assert (parameters, source) != fingerprints(BASE)
    assert parameters == fingerprints(BASE)[0]


def test_fingerprints_are_pinned() -> None:
    """Parameters read as in a def; the hash is of the body's lines, and nothing of any Python."""
    body = '        total = budget + 1\n        return "# not a comment", total'
    assert fingerprints(BASE) == (
        "(self, budget=1, *, strict=False)",
        hashlib.sha256(body.encode()).hexdigest()[:16],
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(self)", "(self)"),
        ("(self, a=A, /, b=[1], *c, d, e=None, **f)", "(self, a=..., /, b=..., *c, d, e=..., **f)"),
        ("@staticmethod (a='(')", "(a=...)"),
    ],
)
def test_shape_hides_default_values(text: str, expected: str) -> None:
    """The shape keeps kinds, names and which parameters have a default."""
    assert fingerprint.parameter_shape(text) == expected


def test_shape_of_a_live_method() -> None:
    """A class in this process has the shape that its source says, however the method is bound."""

    class Live:
        def plain(self, a: int, b: object = [], *, c: str = "x") -> None: ...
        @staticmethod
        def static(a=1): ...
        @classmethod
        def of_class(cls, a): ...
        @property
        def read(self): ...

    class Child(Live): ...

    shapes = [
        fingerprint.live_parameter_shape(Child, name)
        for name in ("plain", "static", "of_class", "read")
    ]
    assert shapes == ["(self, a, b=..., *, c=...)", "(a=...)", "(cls, a)", "(self)"]
    with pytest.raises(LookupError, match="Child has no method gone"):
        fingerprint.live_parameter_shape(Child, "gone")


def test_one_line_method_has_a_body() -> None:
    """A body on the line of its def is told from its parameters."""
    one_line = "class Scheduler:\n    def schedule(self, a{}): {}\n"
    first = fingerprints(one_line.format("", "return 'é', 1"))
    assert fingerprints(one_line.format("=2", "return 'é', 1"))[1] == first[1]
    assert fingerprints(one_line.format("", "return 'é', 2"))[1] != first[1]


INHERITED = {
    "base": "class Base:\n    def stop(self, now=True):\n        self.stopped = now\n",
    "facade": "from .base import Base as Exported\n",
    "core": """
import typing
from abc import ABC
from pkg.facade import Exported
if typing.TYPE_CHECKING:
    from elsewhere import Thing

T = typing.TypeVar("T")

class Scheduler(Exported, typing.Generic[T], ABC):
    def run(self):
        self.running, (self.waiting, _) = 1, (2, 3)
        self.current_step += 1
        other = self.unset
        other.foreign = 1
""",
}


def test_methods_are_found_through_bases_of_the_package() -> None:
    """An inherited method is found through imports, renamed and relative ones too."""
    source = tree(**INHERITED)
    owner = source.find_class("pkg.core", "Scheduler")
    assert [str(each) for each in source.lineage(owner)] == ["pkg.core:Scheduler", "pkg.base:Base"]
    assert fingerprint.parameters(source.find_method(owner, "stop")) == "(self, now=True)"


def test_attributes_are_those_assigned_on_self() -> None:
    """Attributes count when the class or a base assigns them, not when they are only read."""
    source = tree(**INHERITED)
    owner = source.find_class("pkg.core", "Scheduler")
    assert fingerprint.assigned_attributes(source, owner) == {
        "current_step",
        "running",
        "stopped",
        "waiting",
    }


def test_what_is_missing_is_named() -> None:
    """A missing module, class or method is a LookupError that names it."""
    source = tree(**INHERITED)
    with pytest.raises(LookupError, match=r"pkg\.gone has no class Scheduler"):
        source.find_class("pkg.gone", "Scheduler")
    with pytest.raises(LookupError, match=r"pkg\.core has no class Gone"):
        source.find_class("pkg.core", "Gone")
    owner = source.find_class("pkg.core", "Scheduler")
    with pytest.raises(LookupError, match=r"pkg\.core:Scheduler has no method gone"):
        source.find_method(owner, "gone")
    for module in ("pkg.core", "pkg.gone"):
        with pytest.raises(LookupError, match=rf"{module} has no function gone"):
            source.find_function(module, "gone")


@pytest.mark.parametrize(
    ("text", "is_late"),
    [
        ("def schedule(self):\n        from pkg.other import Thing\n        return Thing", True),
        ("def schedule(self):\n        return Thing()", False),
        ("def schedule(self):\n        from pkg.other import Else\n        return Else", False),
    ],
)
def test_lookup_in_another_module(text: str, is_late: bool) -> None:
    """Outside the site's module only an import in the body reads the name at call time."""
    found = method(f"from pkg.other import Thing\nclass Scheduler:\n    {text}\n")
    assert fingerprint.looks_up_at_call_time(found, Site("pkg.other", "Thing")) is is_late


def test_lookup_in_the_sites_own_module() -> None:
    """Inside the site's module reading the global is reading it at call time."""
    found = method("class Thing: ...\nclass Scheduler:\n    def schedule(self): return Thing()\n")
    assert fingerprint.looks_up_at_call_time(found, Site("pkg.core", "Thing"))
    assert not fingerprint.looks_up_at_call_time(found, Site("pkg.core", "Other"))


def test_lookup_by_a_function() -> None:
    """A module's own function may be what reads the name."""
    patch = replace(
        ENGINE,
        sites=(Site("pkg.other", "Thing"),),
        contract=replace(ENGINE.contract, lookups=("pkg.core:make",), collaborators=()),
    )
    late = "async def make():\n    from pkg.other import Thing\n    return Thing()\n"
    assert reads_a_site(tree(core=late), patch)
    assert not reads_a_site(tree(core="def make(): ...\n"), patch)
    method = next(each for each in locked_methods(patch) if each.name == "make")
    assert str(method) == "pkg.core:make"
    assert read_fingerprint(tree(core=late), method)


def test_wheel_and_directory_read_alike(tmp_path: Path) -> None:
    """A package gives the same fingerprints from a wheel as from a directory."""
    (tmp_path / "pkg").mkdir()
    wheel = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {"__init__": "", **INHERITED}.items():
            (tmp_path / "pkg" / f"{name}.py").write_text(text)
            archive.writestr(f"pkg/{name}.py", text.replace("\n", "\r\n"))
    found = []
    for source in (
        SourceTree.from_directory(tmp_path / "pkg"),
        SourceTree.from_wheel(wheel, "pkg"),
    ):
        stop = source.find_method(source.find_class("pkg.core", "Scheduler"), "stop")
        found.append((fingerprint.parameters(stop), fingerprint.source_hash(stop)))
    assert found[0] == found[1]


def test_installed_package_is_found_without_importing_it() -> None:
    """The directory of an installed package is found, and the package stays unimported."""
    package = "pydoc_data"
    sys.modules.pop(package, None)
    assert (installed_root(package) / "topics.py").is_file()
    assert package not in sys.modules
    with pytest.raises(LookupError, match="package 'not_there_at_all' is not installed"):
        installed_root("not_there_at_all")
