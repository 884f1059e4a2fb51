"""Applying patches to a toy package: all or nothing, once, and never over a class of others."""

import copy
import importlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import toy_package
from toy_package import (
    ENGINE,
    ENGINE_SITES,
    PATCHES,
    TURBO,
    TURBO_SITE,
    Toy,
    applied,
    bindings,
    bound,
)

from meridian_patch.errors import PatchRefused
from meridian_patch.patching.registry import Registry
from meridian_patch.patching.report import Outcome, StaleBinding
from meridian_patch.patching.spec import Patch, Site

OFF_SWITCH = "set MERIDIAN_PATCH=0 to switch off, or MERIDIAN_PATCH_MODE=lenient to run stock"


@pytest.fixture
def toy(tmp_path: Path):
    with toy_package.toy_package(tmp_path) as toy:
        yield toy


def refusal(patches: tuple[Patch, ...], upstream) -> str:
    """The message of a strict refusal, after which no site has changed."""
    before = bindings()
    with pytest.raises(PatchRefused) as caught:
        Registry().apply(patches, upstream)
    assert bindings() == before
    message = str(caught.value)
    assert message.endswith(OFF_SWITCH)
    assert "\n" not in message
    return message


def test_every_site_gets_one_marked_subclass(toy: Toy) -> None:
    """All sites of a patch hold the same new subclass of the original, marked with the name."""
    originals = bindings()
    reports = Registry().apply(PATCHES, toy.upstream)
    assert [report.outcome for report in reports] == [Outcome.APPLIED, Outcome.APPLIED]
    core, user, turbo = bindings()
    assert core is user
    assert core.__bases__ == (originals[0],)
    assert turbo.__bases__ == (originals[2],)
    assert (core.__meridian_patch__, turbo.__meridian_patch__) == ("engine", "turbo")


def test_builds_see_only_originals(toy: Toy) -> None:
    """A class that derives from another patched class, first imported here, stays stock's."""
    assert "toy.turbo" not in sys.modules
    Registry().apply(PATCHES, toy.upstream)
    assert [cls.__name__ for cls in bound(TURBO_SITE).__mro__] == [
        "OurTurboEngine",
        "TurboEngine",
        "Engine",
        "Base",
        "object",
    ]


def test_second_apply_changes_nothing(toy: Toy) -> None:
    """A second apply builds nothing and returns the first one's checks as already applied."""
    import toy_build

    registry = Registry()
    first = registry.apply(PATCHES, toy.upstream)
    before = bindings()
    second = registry.apply(PATCHES, toy.upstream)
    assert bindings() == before
    assert len(toy_build.calls) == 2
    assert second == tuple(replace(each, outcome=Outcome.ALREADY_APPLIED) for each in first)
    assert registry.reports() == first


def test_patch_of_another_registry_is_refused(toy: Toy) -> None:
    """A class that carries a mark is not patched a second time."""
    with applied(PATCHES, toy.upstream):
        message = refusal(PATCHES, toy.upstream)
    assert "toy.core:Engine is toy_build.OurEngine, already replaced by patch 'engine'" in message


def test_class_of_another_plugin_is_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that others rebound is left to them, and the message names their class."""

    class Foreign(bound(ENGINE_SITES[0])):
        pass

    monkeypatch.setattr("toy.core.Engine", Foreign)
    message = refusal((ENGINE,), toy.upstream)
    assert "toy.core:Engine was replaced by" in message
    assert "Foreign" in message


def test_sites_that_disagree_are_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sites of one patch must hold the same object."""
    monkeypatch.setattr("toy.user.Engine", dict)
    message = refusal((ENGINE,), toy.upstream)
    assert "toy.user:Engine is builtins.dict, expected toy.core.Engine" in message


@pytest.mark.parametrize(
    ("site", "problem"),
    [
        (Site("toy.nowhere", "Engine"), "toy.nowhere cannot be imported: No module named"),
        (Site("toy.core", "Motor"), "toy.core:Motor does not exist"),
        (Site("toy.core", "__name__"), "toy.core:__name__ is 'toy.core', expected a class"),
    ],
)
def test_missing_site_is_refused(toy: Toy, site: Site, problem: str) -> None:
    """A site without a module or a class is named."""
    assert problem in refusal((replace(TURBO, sites=(site,)),), toy.upstream)


def test_a_site_that_some_releases_lack_is_bound_where_it_is(toy: Toy) -> None:
    """Where it is absent the patch is applied without it."""
    absent = Site("toy.base", "Engine", is_optional=True)
    holder = Site("toy.holder", "Held", is_optional=True)
    patch = replace(ENGINE, sites=(*ENGINE_SITES, absent, holder))
    with applied((patch,), toy.upstream) as (report,):
        assert report.outcome is Outcome.APPLIED
        assert report.stale == ()
        assert bound(holder) is bound(ENGINE_SITES[0])
    assert bound(holder) is bound(ENGINE_SITES[0])
    assert not hasattr(importlib.import_module("toy.base"), "Engine")


def test_failed_build_leaves_everything_as_it_was(toy: Toy) -> None:
    """One factory that raises stops all patches, and its exception is the cause."""
    broken = replace(TURBO, build="toy_build:fail")
    message = refusal((ENGINE, broken), toy.upstream)
    assert "by 'turbo': toy_build:fail failed with RuntimeError: no such luck" in message
    with pytest.raises(PatchRefused) as caught:
        Registry().apply((ENGINE, broken), toy.upstream)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_no_factory_runs_before_every_check_passed(toy: Toy) -> None:
    """A factory may have effects of its own: none is called when a later patch is refused."""
    import toy_build

    refusal((ENGINE, replace(TURBO, sites=(Site("toy.core", "Motor"),))), toy.upstream)
    assert toy_build.calls == []


def test_build_must_return_a_new_subclass(toy: Toy) -> None:
    """The original itself is no replacement."""
    message = refusal((replace(ENGINE, build="toy_build:same"),), toy.upstream)
    assert "toy_build:same returned toy.core.Engine, expected a new subclass" in message


def test_failed_assignment_is_rolled_back(toy: Toy) -> None:
    """When one site cannot be assigned, the sites before it get their originals back."""

    class Frozen(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(f"{name} is frozen")

    toy_package.module(TURBO_SITE).__class__ = Frozen
    message = refusal(PATCHES, toy.upstream)
    assert "toy.turbo:TurboEngine cannot be assigned: TurboEngine is frozen" in message


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("0.9", "supported versions are >=1.0,<2"),
        ("2.0", "supported versions are >=1.0,<2"),
        ("1.0.1", "only these releases were checked: 1.0.0"),
        ("dev", "MERIDIAN_PATCH_ASSUME_VLLM"),
    ],
)
def test_unknown_version_is_refused(toy: Toy, version: str, problem: str) -> None:
    """A version out of range, or in range but never checked, is refused by name."""
    message = refusal(PATCHES, toy.with_version(version))
    assert message.startswith(f"Toy {version} cannot be patched by 'engine': ")
    assert problem in message


def test_local_part_of_a_version_is_ignored(toy: Toy) -> None:
    """The entry of a release stands for its builds, such as 1.0.0+cpu."""
    with applied(PATCHES, toy.with_version("1.0.0+cpu")) as reports:
        assert {report.upstream_version for report in reports} == {"1.0.0+cpu"}


def test_changed_parameters_are_refused(toy: Toy) -> None:
    """A method whose parameters differ from the lock is named with both signatures."""
    lock = copy.deepcopy(dict(toy.upstream.lock))
    lock["1.0.0"]["toy.core:Engine"]["parameters"]["run"] = "(self, item)"
    message = refusal((ENGINE,), toy.with_lock(lock))
    assert "toy.core:Engine.run takes (self, item, *, fast=False), expected (self, item)" in message


def test_method_missing_from_the_lock_is_refused(toy: Toy) -> None:
    """A contract that grew without a new lock is not trusted."""
    lock = copy.deepcopy(dict(toy.upstream.lock))
    del lock["1.0.0"]["toy.core:Engine"]["parameters"]["finish"]
    message = refusal((ENGINE,), toy.with_lock(lock))
    assert "toy.core:Engine.finish is not in the lock (run scripts/update_lock.py)" in message


def test_method_missing_upstream_is_refused(toy: Toy) -> None:
    """A method that the lock has and the sources lack is named; other findings are counted."""
    lock = copy.deepcopy(dict(toy.upstream.lock))
    engine = lock["1.0.0"]["toy.core:Engine"]
    engine["parameters"] |= {"stop": "(self)", "start": "(self)"}
    contract = replace(ENGINE.contract, calls=("stop", "start"))
    message = refusal((replace(ENGINE, contract=contract),), toy.with_lock(lock))
    assert "toy.core:Engine has no method stop" in message
    assert "(and 1 more)" in message


def test_method_replaced_in_this_process_is_refused(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sources are as locked, but the class has a method with other parameters."""
    monkeypatch.setattr("toy.core.Engine.run", lambda self, item: item)
    message = refusal((ENGINE,), toy.upstream)
    assert "toy.core:Engine.run was replaced and takes (self, item), expected" in message


def test_changed_body_is_a_warning(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    """A changed body or lookup, and an attribute never set, are reported but do not refuse."""
    lock = copy.deepcopy(dict(toy.upstream.lock))
    lock["1.0.0"]["toy.core:Engine"]["source"]["run"] = "0" * 16
    lock["1.0.0"]["toy.user:Factory"]["source"]["make"] = "0" * 16
    contract = replace(ENGINE.contract, reads=("size", "colour"))
    with (
        caplog.at_level(logging.WARNING),
        applied((replace(ENGINE, contract=contract),), toy.with_lock(lock)) as (report,),
    ):
        assert report.outcome is Outcome.APPLIED
    details = [check.detail for check in report.checks if not check.ok]
    assert details == [
        "the body of toy.core:Engine.run differs from the one checked",
        "the body of toy.user:Factory.make differs from the one checked",
        "toy.core:Engine never sets colour",
    ]
    assert all(detail in caplog.text for detail in details)


def test_lenient_mode_runs_stock(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is bound, the error is logged, and the report tells who was refused."""
    before = bindings()
    broken = replace(TURBO, build="toy_build:fail")
    engine, turbo = Registry().apply((ENGINE, broken), toy.upstream, strict=False)
    assert bindings() == before
    assert (engine.outcome, turbo.outcome) == (Outcome.DISABLED, Outcome.CONTRACT_BROKEN)
    assert engine.checks[-1].detail == "left out because patch 'turbo' was refused"
    assert "no such luck" in caplog.text


def test_lenient_mode_reports_the_version(toy: Toy) -> None:
    """An unsupported version in lenient mode is an outcome, not an exception."""
    reports = Registry().apply(PATCHES, toy.with_version("3.0"), strict=False)
    assert {report.outcome for report in reports} == {Outcome.VERSION_MISMATCH}


def test_disabled_patch_is_left_out(toy: Toy) -> None:
    """A disabled patch is reported as such and its sites keep their originals."""
    before = bindings()
    engine, turbo = Registry().apply(PATCHES, toy.upstream, disabled=["engine"])
    assert (engine.outcome, turbo.outcome) == (Outcome.DISABLED, Outcome.APPLIED)
    assert bindings()[:2] == before[:2]


def test_stale_bindings_are_listed_and_left_alone(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    """Other globals that hold an original are listed; one used as a base is told apart."""
    holder = importlib.import_module("toy.holder")
    turbo = importlib.import_module("toy.turbo")
    original = bound(ENGINE_SITES[0])
    with applied((ENGINE,), toy.upstream) as (report,):
        assert set(report.stale) == {
            StaleBinding("toy.holder", "Held", is_base=False),
            StaleBinding("toy.turbo", "Engine", is_base=True),
        }
        assert holder.Held is turbo.Engine is original
    assert "toy.holder.Held still holds the original" in caplog.text
    assert "toy.turbo.Engine" not in caplog.text


def test_report_is_json_and_names_this_process(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report survives JSON, and a forked child reports its own id."""
    importlib.import_module("toy.holder")
    registry = Registry()
    (report,) = registry.apply((ENGINE,), toy.upstream)
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain == report.as_dict()
    assert (plain["patch"], plain["outcome"]) == ("engine", "applied")
    assert plain["stale"][0]["module"] == "toy.holder"
    monkeypatch.setattr("os.getpid", lambda: report.pid + 1)
    assert registry.reports() == (replace(report, pid=report.pid + 1),)
