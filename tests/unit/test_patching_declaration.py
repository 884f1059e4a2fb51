"""Declaring a patch, and locking what its contract met."""

from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import toy_package
from packaging.specifiers import InvalidSpecifier
from toy_package import ENGINE, PATCHES, TURBO

from meridian_patch.patching.lock import compute_entry
from meridian_patch.patching.source import SourceTree
from meridian_patch.patching.spec import Contract, Patch


def test_every_field_is_required() -> None:
    """Neither a patch nor its contract has a default: leaving out a reason is a TypeError."""
    for declaration in (Patch, Contract):
        assert {each.default for each in fields(declaration)} == {MISSING}
    values = {each.name: getattr(ENGINE, each.name) for each in fields(Patch)}
    del values["why"]
    with pytest.raises(TypeError, match="'why'"):
        Patch(**values)


@pytest.mark.parametrize("field", ["sites", "build", "why", "upstream", "remove_when"])
def test_empty_field_is_refused(field: str) -> None:
    """A field that is there but empty is no declaration either."""
    with pytest.raises(ValueError, match=f"patch 'engine': field {field} is empty"):
        replace(ENGINE, **{field: type(getattr(ENGINE, field))()})


def test_malformed_build_and_versions_are_refused() -> None:
    """A factory is `module:function`, and a range is PEP 440."""
    with pytest.raises(ValueError, match=r"field build is 'toy_build\.build', expected"):
        replace(ENGINE, build="toy_build.build")
    with pytest.raises(InvalidSpecifier):
        replace(ENGINE, versions="1.x")


def test_entry_holds_what_the_contracts_name(tmp_path: Path) -> None:
    """Parameters of calls, hashes of bodies and lookups, attributes; inherited methods too."""
    with toy_package.toy_package(tmp_path) as toy:
        entry = toy.upstream.lock["1.0.0"]
    assert entry["toy.core:Engine"]["parameters"] == {
        "__init__": "(self, size=1)",
        "run": "(self, item, *, fast=False)",
        "finish": "(self, item)",
    }
    assert set(entry["toy.core:Engine"]["source"]) == {"run"}
    assert entry["toy.core:Engine"]["attributes"] == ["finished", "items", "size"]
    assert set(entry["toy.user:Factory"]["source"]) == {"make", "make_turbo"}
    assert entry["toy.turbo:TurboEngine"]["parameters"] == {"run": "(self, item, *, fast=True)"}


def test_everything_missing_is_listed(tmp_path: Path) -> None:
    """One error names each method, attribute and lookup that the sources lack."""
    contract = Contract(
        calls=("run", "stop"),
        behaviour=("stop", "start"),
        reads=("items", "colour"),
        lookups=("toy.user:Factory.sell", "toy.gone:Factory.make"),
        collaborators=(),
    )
    with (
        toy_package.toy_package(tmp_path) as toy,
        pytest.raises(LookupError) as caught,
    ):
        compute_entry(
            SourceTree.from_directory(toy.upstream.root), (replace(ENGINE, contract=contract),)
        )
    assert caught.value.args[0].split("; ") == [
        "toy.core:Engine has no method stop",
        "toy.core:Engine has no method start",
        "toy.user:Factory has no method sell",
        "toy.gone has no class Factory",
        "toy.core:Engine never sets colour",
    ]


def test_a_release_where_rebinding_does_nothing_is_not_locked(tmp_path: Path) -> None:
    """A lookup that reads none of the sites' names would leave the original in use."""
    patch = replace(TURBO, contract=ENGINE.contract)
    with toy_package.toy_package(tmp_path) as toy, pytest.raises(LookupError) as caught:
        compute_entry(SourceTree.from_directory(toy.upstream.root), (patch,))
    assert caught.value.args == ("toy.user:Factory.make reads no site of patch turbo",)


def test_entry_of_another_package_is_not_computed() -> None:
    """Sources without the patched class are an error, not an empty entry."""
    with pytest.raises(LookupError, match=r"toy\.core has no class Engine"):
        compute_entry(SourceTree("toy", {"toy/__init__.py": ""}.get), PATCHES)
