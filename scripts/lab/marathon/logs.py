"""Reads the logs of a marathon: which lines must not be there."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from marathon.records import LogLine

_FORBIDDEN: Final = re.compile(
    r"Traceback \(most recent call last\)|--- Logging error ---|Segmentation fault|core dumped"
    r"|AssertionError|EngineDeadError|switched off|is off until|Task exception was never retrieved"
    r"|\bCRITICAL\b|\bERROR\b"
)
# Each of these follows from what the marathon does. Pattern in a record -> why it is harmless.
_KNOWN: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (
        re.compile(r"NIXL_ERR_REMOTE_DISCONNECT"),
        "an engine was killed while its blocks were read: vLLM computes them again",
    ),
    (
        re.compile(r"NIXL transfer failure: handshake_(?:setup_)?failed"),
        "a think server was killed or frozen before its blocks were read: vLLM computes them again",
    ),
    (
        re.compile(r"answer engine \S+ rests for \d+ s, and requests answer here: \w*Error\b"),
        "the answer engine was killed, frozen or cut off: its requests answer where they thought",
    ),
    (
        re.compile(r"Failed to send typed request .* error=error sending request"),
        "a think server was killed: vllm-router sends the request to the other one",
    ),
)
# Other failures of the plug-in, and ends of engines, whatever they come from.
_NEVER_KNOWN: Final = re.compile(
    r"meridian_patch: (?!answer engine \S+ rests)|EngineDeadError|fatal error"
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
# vLLM puts this before each line of a record: process, level, time, file and line.
_HEAD: Final = re.compile(r"(?P<head>(?:\([^)]*\) )?[A-Z]+ \S+ \S+ \[[^\]]+\]) ?(?P<message>.*)")
# Characters of a record's first line that begin the next record of the same place.
_OPENING: Final = 24


def read_logs(logs: Sequence[Path]) -> list[LogLine]:
    """The lines of these logs that are forbidden, and the known ones that look so.

    A line is known if any line of its record says why: a traceback ends with its reason.
    """
    lines = []
    for log in logs:
        text = _COLOUR.sub("", log.read_text(errors="replace"))
        for record in _records(text.splitlines()):
            known = _known(record)
            found = filter(_FORBIDDEN.search, record)
            lines += [LogLine(log.name, line[:300], known) for line in found]
    return lines


def _records(lines: Iterable[str]) -> list[list[str]]:
    """Lines that one call of a logger wrote, although other processes write between them."""
    records: list[list[str]] = []
    open_records: dict[str, tuple[str, list[str]]] = {}
    for line in lines:
        match = _HEAD.match(line)
        if match is None:
            records.append([line])
            continue
        head, message = match["head"], match["message"]
        opening, record = open_records.get(head, ("", None))
        if record is None or message.startswith(opening):
            record = []
            records.append(record)
            open_records[head] = message[:_OPENING], record
        record.append(line)
    return records


def _known(record: Sequence[str]) -> str:
    if any(_NEVER_KNOWN.search(line) for line in record):
        return ""
    return next(
        (why for pattern, why in _KNOWN if any(pattern.search(line) for line in record)), ""
    )
