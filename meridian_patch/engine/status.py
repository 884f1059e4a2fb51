"""Tells other processes what is live in this one.

Each patched process writes one small JSON file; ``meridian status`` reads them. Files of ended
processes are ignored and removed by the next reader.
"""

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

from meridian_patch import envs
from meridian_patch.errors import MeridianError

_report: dict[str, Any] = {}


def publish(**facts: Any) -> None:
    """Merge ``facts`` into this process's report and write it.

    A report that cannot be written is no reason to stop an engine: the facts stay in memory.
    """
    if _report.get("pid") != os.getpid():  # first call, or a forked child
        _report.clear()
        _report.update(pid=os.getpid(), parent_pid=os.getppid(), started=_start_time(os.getpid()))
        _report.update(role="launcher", command=" ".join(sys.argv)[:200])
        atexit.register(_remove, os.getpid())
    _report.update(facts)
    path = _path(os.getpid())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(_report, indent=1, default=str))
        partial.replace(path)
    except OSError as error:
        _report["unpublished"] = str(error)


def read_all() -> list[dict[str, Any]]:
    """Reports of all living patched processes of this user, launchers first."""
    directory = envs.status_directory(envs.environment())
    reports = []
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        try:
            report = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise MeridianError(f"status file {path} cannot be read: {error}; delete it") from error
        if _start_time(report["pid"]) == report["started"]:
            reports.append(report)
        else:
            path.unlink(missing_ok=True)
    return sorted(reports, key=lambda report: (report["role"] != "launcher", report["pid"]))


def _path(pid: int) -> Path:
    return envs.status_directory(envs.environment()) / f"{pid}.json"


def _remove(pid: int) -> None:
    if pid == os.getpid():
        _path(pid).unlink(missing_ok=True)


def _start_time(pid: int) -> str | None:
    """Kernel start time of a process, or None when it is gone; tells a reused pid apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
