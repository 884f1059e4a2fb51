"""Publishes what is live in this process as a file for ``meridian status``.

Each patched process writes one small JSON file. The next reader removes files of ended processes,
but for an EngineCore whose API server goes on.

A directory is used only if it belongs to this user, is no symbolic link and is not writable by
other users. Files are opened relative to that open directory, so that another user cannot replace
them by a link.
"""

import atexit
import json
import logging
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meridian_patch import envs
from meridian_patch.errors import MeridianError

logger = logging.getLogger("vllm.meridian_patch")

# Load-bearing: the last path component must be a directory itself; the kernel checks it.
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a named pipe in place of a file must not block the reader.
_READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_report: dict[str, Any] = {}
# Load-bearing: vLLM does not load plug-ins again in a forked child, which has its parent's patches.
_INHERITED = ("vllm_version", "mode", "patches", "front_end")


class _UnsafeDirectoryError(OSError):
    """The directory belongs to another user, or other users may write in it."""


def publish(**facts: Any) -> None:
    """Merge ``facts`` into this process's report and write it.

    The first directory of ``envs.status_directories`` that is safe and writable is used. If there
    is none, that is logged once, and the facts stay in memory.
    """
    if _report.get("pid") != os.getpid():  # first call, or a forked child
        inherited = {name: _report[name] for name in _INHERITED if name in _report}
        _report.clear()
        _report.update(inherited)
        _report.update(pid=os.getpid(), parent_pid=os.getppid(), started=_start_time(os.getpid()))
        _report.update(role="launcher", command=" ".join(sys.argv)[:200])
        atexit.register(_remove, os.getpid())
    _report.update(facts)
    published = {name: value for name, value in _report.items() if name != "unpublished"}
    text = json.dumps(published, indent=1, default=str)
    reasons = []
    try:
        for directory in envs.status_directories(envs.environment()):
            try:
                _write(directory, f"{os.getpid()}.json", text)
                _report.pop("unpublished", None)
                return
            except OSError as error:
                reasons.append(_describe(directory, error))
    except OSError as error:  # the system has no temporary directory
        reasons.append(str(error))
    if "unpublished" not in _report:
        logger.warning(
            "meridian_patch: this process is not shown by 'meridian status': %s. Remove or mend "
            "the directory, or set MERIDIAN_PATCH_STATUS_DIR to one of your own",
            "; ".join(reasons),
        )
    _report["unpublished"] = "; ".join(reasons)


def read_all(*, with_ended: bool = False) -> list[dict[str, Any]]:
    """Reports of all living patched processes of this user, launchers first.

    Directories that are not safe are not read; a warning names them.

    Args:
        with_ended: also those of EngineCores that have ended before the process that started them,
            with ``has_ended``.

    Raises:
        MeridianError: a file is not a report of this user.
    """
    reports = []
    for directory in envs.status_directories(envs.environment()):
        try:
            with _opened(directory) as folder:
                reports += _read_directory(directory, folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("meridian_patch: not read: %s", _describe(directory, error))
    shown = [report for report in reports if with_ended or not report.get("has_ended")]
    return sorted(shown, key=lambda report: (report["role"] != "launcher", report["pid"]))


def problem_of(directory: Path) -> str | None:
    """Why processes would not use an existing directory for their reports; None: they would."""
    try:
        with _opened(directory):
            if os.access(directory, os.W_OK | os.X_OK):
                return None
            return f"{directory} is not used: it cannot be written by this user"
    except OSError as error:
        return _describe(directory, error)


def _read_directory(directory: Path, folder: int) -> list[dict[str, Any]]:
    living, ended = [], []
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".json"):
            continue
        try:
            report = _checked(json.loads(_read(folder, name)))
            is_alive = _start_time(report["pid"]) == report["started"]
        except FileNotFoundError:  # its process just ended
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            path = directory / name
            raise MeridianError(
                f"status file {path} cannot be read: {error!r}; delete it"
            ) from error
        if is_alive:
            living.append(report)
        else:
            ended.append((name, report))
    for name, report in ended:
        if _is_missed(report, living):
            living.append(report | {"has_ended": True})
        else:
            _unlink(folder, name)
    return living


def _checked(report: Any) -> dict[str, Any]:
    """The report, if it says whose it is.

    Raises:
        ValueError: a field has another type.
        KeyError: it is missing.
        TypeError: this is no report.
    """
    for name, kind in (("pid", int), ("started", str), ("role", str)):
        if not isinstance(report[name], kind) or not report[name]:
            raise ValueError(f"{name} is {report[name]!r}, expected {kind.__name__}")
    parent = report.setdefault("parent_pid", None)
    if parent is not None and not isinstance(parent, int):
        raise ValueError(f"parent_pid is {parent!r}, expected int")
    return dict(report)


def _is_missed(ended: dict[str, Any], living: list[dict[str, Any]]) -> bool:
    """Whether an ended process was the engine of one that lives, and has no successor there."""
    if ended["role"] != "engine_core":
        return False
    place = ("role", "parent_pid", "data_parallel_index")
    for other in living:
        is_there = all(other.get(key) == ended.get(key) for key in place)
        if is_there and _began(other) > _began(ended):
            return False
    parents = [other for other in living if other["pid"] == ended["parent_pid"]]
    # A process that has since got the parent's id has started later.
    return any(_began(parent) <= _began(ended) for parent in parents)


def _began(report: dict[str, Any]) -> int:
    return int(report["started"]) if report["started"].isdecimal() else 0


def _write(directory: Path, name: str, text: str) -> None:
    """Write a file of a directory, replacing an old one atomically.

    Raises:
        OSError: the directory is not safe, or it cannot be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(directory) as folder:
        partial = f"{name}.partial"
        _unlink(folder, partial)  # of an ended process with this process id
        file = os.open(partial, _CREATE_FILE, 0o600, dir_fd=folder)
        with os.fdopen(file, "w") as stream:
            stream.write(text)
        os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)


def _read(folder: int, name: str) -> str:
    file = os.open(name, _READ_FILE, dir_fd=folder)
    with os.fdopen(file) as stream:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
            raise OSError("it is no regular file of this user's")
        return stream.read()


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A descriptor of a directory in which only this user can write.

    Raises:
        OSError: the directory does not exist, is a symbolic link, belongs to another user, or is
            writable by others.
    """
    folder = os.open(directory, _OPEN_DIRECTORY)
    try:
        facts = os.fstat(folder)
        if facts.st_uid != os.getuid():
            raise _UnsafeDirectoryError(
                f"it belongs to user {facts.st_uid}, expected {os.getuid()}"
            )
        if facts.st_mode & 0o022:
            mode = stat.S_IMODE(facts.st_mode)
            raise _UnsafeDirectoryError(f"its mode is {mode:o}, expected 700")
        yield folder
    finally:
        os.close(folder)


def _describe(directory: Path, error: OSError) -> str:
    if directory.is_symlink():
        return f"{directory} is a symbolic link, expected a directory"
    return f"{directory} is not used: {error.strerror or error}"


def _unlink(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _remove(pid: int) -> None:
    # Readers remove an engine's, unless its API server goes on without it.
    if pid != os.getpid() or _report.get("role") == "engine_core":
        return
    for directory in envs.status_directories(envs.environment()):
        try:
            with _opened(directory) as folder:
                _unlink(folder, f"{pid}.json")
        except OSError:
            continue


def _start_time(pid: int) -> str | None:
    """Kernel start time of a process, to detect a reused pid; None if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Load-bearing: behind the name come the state, field 3, and in field 22 the start.
    state, *fields = text.rpartition(")")[2].split()
    # One whose parent has not asked how it ended still has an entry.
    return None if state in "ZX" else fields[18]
