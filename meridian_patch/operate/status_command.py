"""``meridian status``: which patched processes of this user live, and what is live in them."""

import json
from collections.abc import Iterable
from contextlib import suppress
from time import time

from rich.console import Console

from meridian_patch.engine.status import read_all
from meridian_patch.operate.status_view import Process, Report, is_live, print_blocks


def run(*, as_json: bool, verbose: bool) -> int:
    """Print the reports.

    Args:
        as_json: all that the processes published, as one JSON list.
        verbose: each patch with its checks, and the command line.

    Returns:
        Exit status: 0 if there is a process, all patches of all processes are in force and no API
        server has lost its engine.

    Raises:
        MeridianError: a file is not a report of this user.
    """
    processes = families(map(_seen, read_all(with_ended=True)))
    if as_json:
        print(json.dumps([process.as_dict() for process in processes], indent=1))
    elif processes:
        print_blocks(Console(highlight=False), processes, verbose=verbose)
    else:
        print("no patched vLLM process of this user is running")
    return 0 if processes and all(map(is_live, processes)) else 1


def families(processes: Iterable[Process]) -> list[Process]:
    """Processes behind those that started them, with how far they are from the first one.

    An engine that has ended is left out where no server waits for it: a program may end one.
    """
    seen = list(processes)
    # A server may have several processes, of which the first one has started the engines.
    waiting = {
        each.report.get(key) for each in seen if each.is_server for key in ("pid", "parent_pid")
    }
    by_pid = {
        each.report["pid"]: each
        for each in seen
        if not each.report.get("has_ended") or each.report.get("parent_pid") in waiting
    }
    ordered: list[Process] = []

    def parent_of(process: Process) -> Process | None:
        parent = by_pid.get(process.report.get("parent_pid"))
        # An id may have been given to another process since.
        is_earlier = parent and parent is not process and _start(parent) <= _start(process)
        return parent if is_earlier else None

    def add(process: Process, depth: int) -> None:
        ordered.append(process._replace(depth=depth))
        for other in by_pid.values():
            if parent_of(other) is process:
                add(other, depth + 1)

    for process in by_pid.values():
        if parent_of(process) is None:
            add(process, 0)
    return ordered


def _start(process: Process) -> int:
    started = str(process.report.get("started"))
    return int(started) if started.isdecimal() else 0


def _seen(report: Report) -> Process:
    """A process with what its system knows of it, as far as this user may see it."""
    process = Process(report)
    if report.get("has_ended"):
        return process
    # It comes with vLLM, which this environment need not have.
    with suppress(ImportError):
        import psutil

        # Before psutil 6 a process had another method for its sockets.
        with suppress(psutil.Error, AttributeError):
            known = psutil.Process(report["pid"])
            process = process._replace(age_s=max(0.0, time() - known.create_time()))
            sockets = known.net_connections("tcp")
            ports = {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}
            process = process._replace(ports=tuple(sorted(ports)))
    return process
