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
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._facts: Mapping[str, Any] = {}
        self._written_s = -inf

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write the device's properties, and that it has done nothing."""
        self._facts = dict(facts)
        self.write(Ledger(), -inf)

    def write_sometimes(self, ledger: Ledger, now_s: float) -> None:
        """Write what is in the ledger, if the last time was a while ago."""
        if now_s - self._written_s >= _INTERVAL_S:
            self.write(ledger, now_s)

    def write(self, ledger: Ledger, now_s: float) -> None:
        """Write what is in the ledger at ``now_s``."""
        self._written_s = now_s
        if self._path is None:
            return
        text = json.dumps({**self._facts, "pid": os.getpid(), **ledger.as_dict()}, indent=1)
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        beside.write_text(text + "\n")
        beside.replace(self._path)
