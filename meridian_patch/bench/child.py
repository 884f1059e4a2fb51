"""Child processes: a group of their own, a log, JSON lines in and out, a clean end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meridian_patch.errors import MeridianError

LOG_TAIL_LINES = 20
_END_S = 30.0


class JsonChild:
    """A Python module in a process of its own that answers JSON lines with JSON lines.

    Args:
        module: dotted name.
        env: complete environment.
        log: file that takes what it prints beside its answers.
        failure: makes the error that is raised when it has ended before it was done.
    """

    def __init__(
        self,
        module: str,
        env: Mapping[str, str],
        log: Path,
        failure: Callable[[str], MeridianError],
    ) -> None:
        self._log = log
        self._failure = failure
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                # -P keeps the working directory off sys.path: vLLM would take a folder named
                # triton_kernels there for the package it knows under that name.
                [sys.executable, "-P", "-m", module],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                # Its own group: Ctrl-C reaches us alone, and we end the whole group.
                process_group=0,
            )

    def send(self, value: Mapping[str, Any]) -> None:
        """Raises what ``failure`` makes if the reader is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended_early() from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next answer; raises what ``failure`` makes when none will come."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended_early()
        value: dict[str, Any] = json.loads(line)
        return value

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal it, give it time, and make sure."""
        end_group(self._process, _END_S, number)

    def finish(self) -> None:
        """Tell it that nothing more will come, give it time, and make sure."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        end_group(self._process, _END_S, None)

    def _ended_early(self) -> MeridianError:
        return self._failure(f"the engine ended before it was done. {log_tail(self._log)}")


def end_group(
    process: "subprocess.Popen[Any]",
    limit_s: float,
    number: signal.Signals | None = signal.SIGTERM,
) -> None:
    """End a process that leads its group, and whatever it started: ask, wait, force.

    Args:
        process: of any kind.
        limit_s: how long to wait for the process itself.
        number: how to ask; None: it knows already.
    """
    if number is not None:
        _signal(process.pid, number)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Its children may outlive it.
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def log_tail(log: Path) -> str:
    """Where a child's log is, and its last lines."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"Its log is {log}; the last lines:", *lines])


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
