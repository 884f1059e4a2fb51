"""Undoing patches of a toy package: in reverse, exactly, and never over a class of others."""

from pathlib import Path
from types import ModuleType

import pytest
import toy_package
from toy_package import ENGINE, ENGINE_SITES, PATCHES, SITES, Toy, applied, bindings, bound

from meridian_patch.errors import PatchRefused
from meridian_patch.patching.registry import Registry
from meridian_patch.patching.report import Outcome


@pytest.fixture
def toy(tmp_path: Path):
    with toy_package.toy_package(tmp_path) as toy:
        yield toy


def test_undo_restores_the_very_objects(toy: Toy) -> None:
    """After undo every site holds the object it held before, and the report says so."""
    originals = bindings()
    registry = Registry()
    registry.apply(PATCHES, toy.upstream)
    reports = registry.undo()
    assert all(now is before for now, before in zip(bindings(), originals, strict=True))
    assert [(each.patch, each.outcome) for each in reports] == [
        ("turbo", Outcome.UNDONE),
        ("engine", Outcome.UNDONE),
    ]
    assert {each.outcome for each in registry.reports()} == {Outcome.UNDONE}


def test_undo_runs_backwards(toy: Toy) -> None:
    """Sites are restored in the reverse of the order they were assigned in."""
    assigned = []

    class Recorder(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            assigned.append(f"{self.__name__}:{name}")
            super().__setattr__(name, value)

    for site in SITES:
        toy_package.module(site).__class__ = Recorder
    assigned.clear()
    registry = Registry()
    registry.apply(PATCHES, toy.upstream)
    assert assigned == [str(site) for site in SITES]
    assigned.clear()
    registry.undo()
    assert assigned == [str(site) for site in reversed(SITES)]


def test_undo_of_nothing_is_nothing(toy: Toy) -> None:
    """A registry that applied nothing, or has undone it, has nothing to undo."""
    registry = Registry()
    assert registry.undo() == ()
    registry.apply(PATCHES, toy.upstream)
    registry.undo()
    assert registry.undo() == ()


def test_patches_can_be_applied_again_after_undo(toy: Toy) -> None:
    """Undo leaves nothing behind that stands in the way of a new apply."""
    registry = Registry()
    registry.apply(PATCHES, toy.upstream)
    first = bindings()
    registry.undo()
    reports = registry.apply(PATCHES, toy.upstream)
    assert {each.outcome for each in reports} == {Outcome.APPLIED}
    assert not set(bindings()) & set(first)


def test_undo_refuses_to_drop_a_class_of_others(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that was rebound after us is named with what is there, and nothing is restored."""
    registry = Registry()
    registry.apply(PATCHES, toy.upstream)
    with monkeypatch.context() as patched:
        patched.setattr("toy.user.Engine", dict)
        before = bindings()
        with pytest.raises(
            PatchRefused,
            match=r"cannot undo patch 'engine': toy\.user:Engine is builtins\.dict, "
            r"expected toy_build\.OurEngine",
        ):
            registry.undo()
        assert bindings() == before
    assert len(registry.undo()) == 2


def test_second_apply_refuses_over_a_class_of_others(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once overwritten, a live patch is not silently reported as live."""
    registry = Registry()
    registry.apply(PATCHES, toy.upstream)
    monkeypatch.setattr("toy.core.Engine", dict)
    with pytest.raises(PatchRefused, match=r"toy\.core:Engine is builtins\.dict"):
        registry.apply(PATCHES, toy.upstream)
    report = registry.apply(PATCHES, toy.upstream, strict=False)[0]
    assert report.outcome is Outcome.CONTRACT_BROKEN


def test_with_block_undoes_after_an_exception(toy: Toy) -> None:
    """`applied` restores the originals however its block ends."""
    original = bound(ENGINE_SITES[0])
    with pytest.raises(KeyError), applied((ENGINE,), toy.upstream):
        assert bound(ENGINE_SITES[0]) is not original
        raise KeyError
    assert bound(ENGINE_SITES[0]) is original
