"""Values of a report on patches: outcome, checks, and names that still hold an original."""

import multiprocessing
import os
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


def _process_name() -> str:
    return multiprocessing.current_process().name


class Outcome(StrEnum):
    """What became of a patch."""

    APPLIED = "applied"
    ALREADY_APPLIED = "already_applied"
    DISABLED = "disabled"
    VERSION_MISMATCH = "version_mismatch"
    CONTRACT_BROKEN = "contract_broken"
    UNDONE = "undone"


@dataclass(frozen=True)
class Check:
    """One thing looked at before a patch was applied.

    Attributes:
        name: what was looked at.
        ok: whether it was as expected.
        is_hard: a failed hard check is a refusal, a failed soft one a warning.
        detail: what was found, and what was expected when that differs.
    """

    name: str
    ok: bool
    is_hard: bool
    detail: str


@dataclass(frozen=True)
class StaleBinding:
    """A global outside the declared sites that still holds an original.

    Attributes:
        module: the module that holds it.
        attribute: the name it is held by.
        is_base: the module derives a class of its own from the original, which is why it holds
            it; nothing else there is known to use the name.
    """

    module: str
    attribute: str
    is_base: bool


@dataclass(frozen=True)
class PatchReport:
    """What became of one patch, in which process.

    Attributes:
        patch: name of the patch.
        outcome: what became of it.
        upstream_version: version of the patched package, as it states it.
        checks: what was looked at, in order.
        stale: globals that still hold the original.
        process: name of the process.
        pid: its id.
    """

    patch: str
    outcome: Outcome
    upstream_version: str
    checks: tuple[Check, ...] = ()
    stale: tuple[StaleBinding, ...] = ()
    process: str = field(default_factory=_process_name)
    pid: int = field(default_factory=os.getpid)

    def stamped(self) -> "PatchReport":
        """The same report as of this process, which may be a fork of the one that applied it."""
        return replace(self, process=_process_name(), pid=os.getpid())

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON knows it: dicts, lists, strings, numbers and booleans."""
        plain = asdict(self)
        return plain | {
            "outcome": self.outcome.value,
            "checks": list(plain["checks"]),
            "stale": list(plain["stale"]),
        }
