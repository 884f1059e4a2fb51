"""Keeps every reply of the engine as it comes, so that an interrupted calibration can continue."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from meridian_patch.calibrate.engine_process import Reply
from meridian_patch.errors import CalibrationError

_DECIMALS = 7


class Journal:
    """A file of replies by key: JSON lines, the settings they were made with first.

    All that is not in the settings may change from one calibration to the next. With more problems,
    another grader, tolerance or thresholds, the engine is asked only for the missing replies.

    Args:
        path: of the file; it is made where it is missing.
        settings: that replies depend on, beside their key.

    Raises:
        CalibrationError: the file is not a journal, or has other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._replies: dict[str, Reply] = {}
        self._notes: dict[str, dict[str, int]] = {}
        # As JSON reads them back.
        self._settings = json.loads(json.dumps(settings))
        whole = self._read() if path.is_file() else 0
        self._file = path.open("r+b" if path.is_file() else "w+b")
        # Drops a line that was cut off; its request is made again.
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._append({"settings": self._settings})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def get(self, key: str) -> Reply | None:
        """The reply with this key; None: not in the file."""
        return self._replies.get(key)

    def add(self, key: str, reply: Reply) -> Reply:
        """Write a reply to disk at once; the reply as it will be read back."""
        rounded = None
        if reply.entropies is not None:
            rounded = [round(entropy, _DECIMALS) for entropy in reply.entropies]
        self._append({"key": key, "ids": reply.ids, "entropies": rounded})
        kept = self._replies[key] = Reply(reply.ids, rounded)
        return kept

    def noted(self, name: str) -> dict[str, int] | None:
        """Figures of the engine under this name; None: not in the file."""
        return self._notes.get(name)

    def note(self, name: str, figures: Mapping[str, int]) -> dict[str, int]:
        """Write figures of the engine to disk at once; as they will be read back."""
        self._append({"note": name, "figures": dict(figures)})
        kept = self._notes[name] = dict(figures)
        return kept

    def _append(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Read the file; the number of bytes of its whole lines."""
        whole = 0
        for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                values = json.loads(line)
                if number == 1:
                    self._compare(values["settings"])
                elif "note" in values:
                    self._notes[values["note"]] = dict(values["figures"])
                else:
                    self._replies[values["key"]] = Reply(values["ids"], values["entropies"])
            except (ValueError, KeyError, TypeError):
                raise CalibrationError(
                    f"file {self._path}, line {number}, is not what a calibration has written; "
                    "delete the file, or choose another --out"
                ) from None
            whole += len(line)
        return whole

    def _compare(self, kept: Mapping[str, Any]) -> None:
        for name in {**kept, **self._settings}:
            before, now = kept.get(name), self._settings.get(name)
            if before != now:
                raise CalibrationError(
                    f"file {self._path} is of a calibration with {name} {before!r}, and now it is "
                    f"{now!r}; choose another --out, or delete the file"
                )
