"""What is looked at before a patch is applied; each function is one stage of the transaction.

A stage looks at one candidate and adds what it saw. It never assigns to a site.
"""

import importlib
from typing import Any

from packaging.specifiers import SpecifierSet

from meridian_patch.patching import fingerprint, lock
from meridian_patch.patching.candidate import MARK, Candidate, describe
from meridian_patch.patching.lock import Entry, LockedMethod, Upstream
from meridian_patch.patching.report import Outcome
from meridian_patch.patching.source import SourceTree


def check_live(candidate: Candidate, record: Candidate) -> None:
    """Check a patch whose name was applied before; never raises.

    Sets ``candidate.outcome`` to ALREADY_APPLIED if it equals the patch of ``record`` and all sites
    still hold the replacement; otherwise adds a failed check.
    """
    if candidate.patch != record.patch:
        candidate.failed("live", f"another patch named {candidate.patch.name!r} is live")
        return
    overwritten = record.overwritten()
    if overwritten:
        candidate.failed("live", overwritten)
    else:
        candidate.outcome = Outcome.ALREADY_APPLIED


def check_version(candidate: Candidate, upstream: Upstream) -> None:
    """The upstream version is in the patch's range and in the lock."""
    patch, outcome = candidate.patch, Outcome.VERSION_MISMATCH
    release = upstream.release
    if release is None:
        candidate.failed(
            "version",
            f"its version {upstream.version!r} is not a PEP 440 version, so name the release it "
            "was built from in MERIDIAN_PATCH_ASSUME_VLLM",
            outcome=outcome,
        )
    elif not SpecifierSet(patch.versions).contains(release, prereleases=True):
        candidate.failed("version", f"supported versions are {patch.versions}", outcome=outcome)
    elif release not in upstream.lock:
        locked = ", ".join(upstream.lock) or "none"
        candidate.failed("version", f"only these releases were checked: {locked}", outcome=outcome)
    else:
        candidate.passed("version", f"{release} is in {patch.versions} and locked")


def resolve(candidate: Candidate) -> None:
    """Import the sites' modules; all sites hold one class, and it is upstream's own."""
    definition = candidate.patch.definition
    found: list[Any] = []
    for site in candidate.patch.sites:
        try:
            module = importlib.import_module(site.module)
        except Exception as error:
            candidate.failed("sites", f"{site.module} cannot be imported: {error}", cause=error)
            return
        # vars, not getattr: a module's __getattr__ could answer with something that is not bound.
        if site.attribute not in vars(module):
            if site.is_optional:
                continue
            candidate.failed("sites", f"{site} does not exist")
            return
        candidate.bindings.append((site, module))
        found.append(vars(module)[site.attribute])
    original = found[0]
    if not isinstance(original, type):
        candidate.failed("sites", f"{definition} is {describe(original)}, expected a class")
    elif hasattr(original, MARK):
        mark = getattr(original, MARK)
        candidate.failed(
            "sites",
            f"{definition} is {describe(original)}, already replaced by patch {mark!r} applied "
            "elsewhere",
        )
    elif f"{original.__module__}:{original.__qualname__}" != str(definition):
        candidate.failed("sites", f"{definition} was replaced by {describe(original)}")
    else:
        for (site, _), value in zip(candidate.bindings, found, strict=True):
            if value is not original:
                candidate.failed(
                    "sites", f"{site} is {describe(value)}, expected {describe(original)}"
                )
                return
        candidate.original = original
        candidate.passed("sites", ", ".join(str(site) for site, _ in candidate.bindings))


def check_contract(candidate: Candidate, tree: SourceTree, entry: Entry) -> None:
    """Upstream's sources and the class in this process are what the lock says."""
    n_before = len(candidate.checks)
    for method in lock.locked_methods(candidate.patch):
        expected = lock.locked_fingerprint(entry, method)
        if expected is None:
            candidate.failed(
                method.kind, f"{method} is not in the lock (run scripts/update_lock.py)"
            )
            continue
        try:
            _check_method(candidate, method, lock.read_fingerprint(tree, method), expected)
        except (LookupError, TypeError, ValueError) as error:  # the last two from inspect
            candidate.failed(method.kind, f"{method} cannot be read: {error}", cause=error)
    if not candidate.is_broken:
        for attribute in lock.missing_attributes(tree, candidate.patch):
            candidate.warned("attributes", f"{candidate.patch.definition} never sets {attribute}")
    if len(candidate.checks) == n_before:
        candidate.passed("contract", "parameters, source and attributes are as locked")


def _check_method(candidate: Candidate, method: LockedMethod, found: str, expected: str) -> None:
    if method.kind == "source":
        if found != expected:
            candidate.warned("source", f"the body of {method} differs from the one checked")
        return
    if found != expected:
        candidate.failed("parameters", f"{method} takes {found}, expected {expected}")
        return
    live = fingerprint.live_parameter_shape(candidate.original, method.name)
    if live != fingerprint.parameter_shape(expected):
        candidate.failed(
            "parameters", f"{method} was replaced and takes {live}, expected {expected}"
        )


def build(candidate: Candidate) -> None:
    """Call the patch's factory; its result is a new subclass of the original."""
    module, _, function = candidate.patch.build.partition(":")
    try:
        replacement = getattr(importlib.import_module(module), function)(candidate.original)
    except Exception as error:
        detail = f"{candidate.patch.build} failed with {type(error).__name__}: {error}"
        candidate.failed("build", detail, cause=error)
        return
    if (
        not isinstance(replacement, type)
        or replacement is candidate.original
        or not issubclass(replacement, candidate.original)
    ):
        candidate.failed(
            "build",
            f"{candidate.patch.build} returned {describe(replacement)}, expected a new subclass "
            f"of {describe(candidate.original)}",
        )
        return
    setattr(replacement, MARK, candidate.patch.name)
    candidate.replacement = replacement
    candidate.passed("build", describe(replacement))
