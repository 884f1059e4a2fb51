"""The file in which an emulated device says how late it was."""

import json
import os
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from meridian_patch.emulation.ledger import Ledger

# While steps run; their own work comes first.
_INTERVAL_S = 1.0


class ReportFile:
    """Writes a ledger to a file that is always whole.

    Args:
        path: of the file; None writes nothing.
        rank: of several engines of one server; the first has the path as it is.
    """

    def __init__(self, path: Path | None, rank: int = 0) -> None:
        self._path = path.with_stem(f"{path.stem}-{rank}") if path and rank else path
        self._facts: Mapping[str, Any] = {}
        self._written_s = -inf
        self._written_steps = -1

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write the device's properties, and that it has done nothing."""
        self._facts = dict(facts)
        self.write(Ledger(), -inf)

    def write_sometimes(self, ledger: Ledger, now_s: float) -> None:
        """Write what is in the ledger, if the last time was a while ago."""
        if now_s - self._written_s >= _INTERVAL_S:
            self.write(ledger, now_s)

    def write(self, ledger: Ledger, now_s: float) -> None:
        """Write what is in the ledger at ``now_s``, if that is something new."""
        if self._path is None or ledger.steps == self._written_steps:
            return
        self._written_s, self._written_steps = now_s, ledger.steps
        text = json.dumps({**self._facts, "pid": os.getpid(), **ledger.as_dict()}, indent=1)
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        beside.write_text(text + "\n")
        beside.replace(self._path)
