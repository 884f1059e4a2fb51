"""A patch on its way to being applied."""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from meridian_patch.patching.report import Check, Outcome
from meridian_patch.patching.spec import Patch, Site

MARK = "__meridian_patch__"
"""Set to the patch's name on each replacement; a subclass inherits it."""


@dataclass
class Candidate:
    """A patch on its way to being applied, and afterwards the record of it.

    Attributes:
        patch: the declaration.
        outcome: what became of it so far.
        checks: what was looked at so far.
        cause: the exception behind a failed check, if there was one.
        bindings: each site that this release has, with its module; set when resolved.
        original: the class the sites hold, once resolved.
        replacement: the class to bind there, once built.
    """

    patch: Patch
    outcome: Outcome = Outcome.DISABLED
    checks: list[Check] = field(default_factory=list)
    cause: Exception | None = None
    bindings: list[tuple[Site, ModuleType]] = field(default_factory=list)
    original: type = object
    replacement: type = object

    @property
    def is_broken(self) -> bool:
        """True once a hard check failed."""
        return self.outcome in {Outcome.VERSION_MISMATCH, Outcome.CONTRACT_BROKEN}

    def overwritten(self) -> str | None:
        """What stands at a site instead of the replacement once applied, or None."""
        for site, module in self.bindings:
            found = vars(module).get(site.attribute)
            if found is not self.replacement:
                return f"{site} is {describe(found)}, expected {describe(self.replacement)}"
        return None

    def passed(self, name: str, detail: str) -> None:
        self.checks.append(Check(name, ok=True, is_hard=True, detail=detail))

    def failed(
        self,
        name: str,
        detail: str,
        *,
        outcome: Outcome = Outcome.CONTRACT_BROKEN,
        cause: Exception | None = None,
    ) -> None:
        self.checks.append(Check(name, ok=False, is_hard=True, detail=detail))
        self.outcome = outcome
        self.cause = self.cause or cause

    def warned(self, name: str, detail: str) -> None:
        self.checks.append(Check(name, ok=False, is_hard=False, detail=detail))


def describe(value: Any) -> str:
    """The dotted name of a class, or the representation of anything else."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
