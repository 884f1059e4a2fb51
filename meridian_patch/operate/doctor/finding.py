"""One thing that the doctor looked at, and what to do about it."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: what it belongs to: ``environment``, ``configuration``, ``model``, ``server``,
            ``hand-off``, or ``answer engine`` with its address.
        check: what was looked at, in a few words.
        state: ``fail``: it does not work; ``warn``: it works otherwise than most want; ``skip``:
            it could not be looked at.
        found: what was there; for ``skip`` why it was not looked at.
        expected: what should be there.
        fix: what to do, in one line; empty where nothing is to do.
    """

    area: str
    check: str
    state: State
    found: str
    expected: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON knows it."""
        return {name: str(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Area:
    """Makes findings of one area."""

    name: str

    def ok(self, check: str, found: str) -> Finding:
        """All is as it should be."""
        return Finding(area=self.name, check=check, state=State.OK, found=found)

    def warn(self, check: str, found: str, *, expected: str, fix: str) -> Finding:
        """It works, but not as most want it."""
        return self._told(check, State.WARN, found, expected, fix)

    def fail(self, check: str, found: str, *, expected: str, fix: str) -> Finding:
        """It does not work."""
        return self._told(check, State.FAIL, found, expected, fix)

    def skip(self, check: str, why: str) -> Finding:
        """It was not looked at."""
        return Finding(area=self.name, check=check, state=State.SKIP, found=why)

    def _told(self, check: str, state: State, found: str, expected: str, fix: str) -> Finding:
        return Finding(
            area=self.name, check=check, state=state, found=found, expected=expected, fix=fix
        )
