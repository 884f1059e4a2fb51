"""Applies patches in one transaction, remembers them, and undoes them.

::

    versions -> import every site -> contracts -> build every replacement -> assign every site

Each stage ends for all patches before the next begins. Nothing is assigned before everything is
built: a class that derives from another patched class must be built while both are originals.
"""

import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from types import ModuleType

from meridian_patch.errors import PatchRefused
from meridian_patch.patching import checks
from meridian_patch.patching.candidate import Candidate
from meridian_patch.patching.lock import Upstream
from meridian_patch.patching.report import Outcome, PatchReport, StaleBinding
from meridian_patch.patching.source import SourceTree
from meridian_patch.patching.spec import Patch, Site

logger = logging.getLogger(__name__)

_OWN_PACKAGE = __name__.partition(".")[0]

Reports = tuple[PatchReport, ...]


class Registry:
    """The patches that are live in this process. A forked child inherits it, bindings and all."""

    def __init__(self) -> None:
        # By name, in the order applied. Holds exactly the patches bound at their sites.
        self._live: dict[str, Candidate] = {}
        # What last became of each patch ever asked for, by name.
        self._reports: dict[str, PatchReport] = {}

    def reports(self) -> Reports:
        """What last became of each patch ever asked for, as of this process."""
        return tuple(report.stamped() for report in self._reports.values())

    def apply(
        self,
        patches: Sequence[Patch],
        upstream: Upstream,
        *,
        strict: bool = True,
        disabled: Collection[str] = (),
    ) -> Reports:
        """Apply all patches, or none. One that is live already is left as it is.

        Args:
            patches: declarations with distinct names.
            upstream: the package they patch.
            strict: raise on a mismatch; otherwise log it and leave everything as it is.
            disabled: names of patches to leave out.

        Returns:
            One report per patch, in their order.

        Raises:
            PatchRefused: in strict mode, when any check fails. No site was changed.
        """
        candidates = [Candidate(patch) for patch in patches]
        new = []
        for candidate in candidates:
            name = candidate.patch.name
            if name in self._live:
                checks.check_live(candidate, self._live[name])
            elif name not in disabled:
                new.append(candidate)
        _check_and_build(new, upstream)
        if not _broken(candidates):
            _assign(new)
        broken = _broken(candidates)
        if not broken:
            self._live |= {candidate.patch.name: candidate for candidate in new}
        for candidate in new if broken else ():
            if not candidate.is_broken:
                name = broken[0].patch.name
                candidate.warned("transaction", f"left out because patch {name!r} was refused")
        reports = tuple(self._report(candidate, upstream) for candidate in candidates)
        if broken:
            message = _refusal(broken, upstream)
            if strict:
                raise PatchRefused(message) from broken[0].cause
            logger.error("%s", message)
        return reports

    def undo(self) -> Reports:
        """Bind every original again, the last applied first.

        This restores names, not objects: an engine built while patched keeps its classes.

        Returns:
            One report per patch that was live, in the order undone.

        Raises:
            PatchRefused: a site no longer holds our replacement. Nothing was restored.
        """
        undone = list(reversed(self._live.values()))
        for record in undone:
            overwritten = record.overwritten()
            if overwritten:
                raise PatchRefused(
                    f"cannot undo patch {record.patch.name!r}: {overwritten}; undo what "
                    "replaced it first"
                )
        for record in undone:
            for site, module in reversed(record.bindings):
                setattr(module, site.attribute, record.original)
            name = record.patch.name
            self._reports[name] = replace(
                self._reports[name].stamped(), outcome=Outcome.UNDONE, stale=()
            )
        self._live.clear()
        return tuple(self._reports[record.patch.name] for record in undone)

    def _report(self, candidate: Candidate, upstream: Upstream) -> PatchReport:
        name = candidate.patch.name
        if candidate.outcome is Outcome.ALREADY_APPLIED:
            return replace(self._reports[name].stamped(), outcome=Outcome.ALREADY_APPLIED)
        stale: tuple[StaleBinding, ...] = ()
        if candidate.outcome is Outcome.APPLIED:
            stale = _stale_bindings(candidate.original, candidate.patch.sites)
        report = PatchReport(
            patch=name,
            outcome=candidate.outcome,
            upstream_version=upstream.version,
            checks=tuple(candidate.checks),
            stale=stale,
        )
        self._reports[name] = report
        _log(report)
        return report


def _stale_bindings(original: type, sites: Iterable[Site]) -> tuple[StaleBinding, ...]:
    """Globals of loaded modules, outside the sites and this package, that hold the original."""
    subclasses: list[type] = original.__subclasses__()
    deriving = {cls.__module__ for cls in subclasses}
    declared = {(site.module, site.attribute) for site in sites}
    found = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == _OWN_PACKAGE:
            continue
        for attribute, value in list(vars(module).items()):
            if value is original and (name, attribute) not in declared:
                found.append(StaleBinding(name, attribute, is_base=name in deriving))
    return tuple(found)


def _check_and_build(candidates: Sequence[Candidate], upstream: Upstream) -> None:
    """Run the stages that change nothing; stop after the first in which a check failed."""
    tree = SourceTree.from_directory(upstream.root)
    entry = upstream.lock.get(upstream.release or "", {})
    stages = (
        lambda each: checks.check_version(each, upstream),
        checks.resolve,
        lambda each: checks.check_contract(each, tree, entry),
        checks.build,
    )
    for stage in stages:
        for candidate in candidates:
            stage(candidate)
        if _broken(candidates):
            return


def _assign(candidates: Sequence[Candidate]) -> None:
    """Bind every replacement; on an error bind the originals again, in reverse."""
    bindings = [(each, site, module) for each in candidates for site, module in each.bindings]
    for n_assigned, (candidate, site, module) in enumerate(bindings):
        try:
            setattr(module, site.attribute, candidate.replacement)
        except Exception as error:
            candidate.failed("assign", f"{site} cannot be assigned: {error}", cause=error)
            for earlier, changed, owner in reversed(bindings[:n_assigned]):
                setattr(owner, changed.attribute, earlier.original)
            return
    for candidate in candidates:
        candidate.outcome = Outcome.APPLIED


def _broken(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.is_broken]


def _refusal(broken: Sequence[Candidate], upstream: Upstream) -> str:
    """One sentence: what differs, in which version, and how to go on without the patches."""
    details = dict.fromkeys(
        check.detail
        for candidate in broken
        for check in candidate.checks
        if check.is_hard and not check.ok
    )
    first, *others = details
    more = f" (and {len(others)} more)" if others else ""
    name = broken[0].patch.name
    return (
        f"{upstream.title} {upstream.version} cannot be patched by {name!r}: {first}{more}; "
        "set MERIDIAN_PATCH=0 to switch off, or MERIDIAN_PATCH_MODE=lenient to run stock"
    )


def _log(report: PatchReport) -> None:
    logger.info("patch %s: %s", report.patch, report.outcome)
    for check in report.checks:
        if not check.ok and not check.is_hard:
            logger.warning("patch %s: %s", report.patch, check.detail)
    for stale in report.stale:
        if not stale.is_base:
            logger.warning(
                "patch %s: %s.%s still holds the original",
                report.patch,
                stale.module,
                stale.attribute,
            )
