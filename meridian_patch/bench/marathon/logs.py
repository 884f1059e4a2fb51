"""Reads the logs of a marathon: which lines must not be there."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from meridian_patch.bench.marathon.records import LogLine

_FORBIDDEN: Final = re.compile(
    r"Traceback \(most recent call last\)|--- Logging error ---|Segmentation fault|core dumped"
    r"|AssertionError|EngineDeadError|switched off|is off until|Task exception was never retrieved"
    r"|\bCRITICAL\b|\bERROR\b"
)
# Each of these follows from what the marathon does. Pattern of the line -> why it is harmless.
_KNOWN: Final[tuple[tuple[re.Pattern[str], str], ...]] = ()


def read_logs(logs: Sequence[Path]) -> list[LogLine]:
    """The lines of these logs that are forbidden, and the known ones that look so."""
    return [
        LogLine(log.name, text[:300], _known(text))
        for log in logs
        for text in log.read_text(errors="replace").splitlines()
        if _FORBIDDEN.search(text)
    ]


def _known(text: str) -> str:
    return next((why for pattern, why in _KNOWN if pattern.search(text)), "")
