"""Child processes: engines that answer JSON lines, ends of process groups, tails of logs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from meridian_patch import envs
from meridian_patch.errors import MeridianError

LOG_TAIL_LINES = 20
_END_S = 30.0


class EngineChild:
    """A vLLM engine in a process of its own, which answers JSON lines with JSON lines.

    As a context it ends the process, which also ends by itself when its input does.

    Args:
        engine_class: answers there, as ``MODULE:CLASS``; see ``meridian_patch.bench.engine_main``.
        job: for the class.
        variables: of the environment; inherited ``MERIDIAN_PATCH*`` are left out.
        log: file that takes what the engine prints.
        failure: makes the error that is raised when the process ended early.

    Attributes:
        facts: the first reply, sent when the engine is up.
    """

    def __init__(
        self,
        engine_class: str,
        job: Mapping[str, Any],
        variables: Mapping[str, str],
        log: Path,
        failure: Callable[[str], MeridianError],
    ) -> None:
        self._log = log
        self._failure = failure
        env = {n: v for n, v in envs.environment().items() if not n.startswith(envs.PREFIX)}
        # The class reaches into the scheduler, so that the engine core is in its process.
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables}
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                # -P keeps the working directory off sys.path: vLLM would take a folder named
                # triton_kernels there for the package it knows under that name.
                [sys.executable, "-P", "-m", "meridian_patch.bench.engine_main", engine_class],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                # Its own group: Ctrl-C reaches us alone, and we end the whole group.
                process_group=0,
            )
        try:
            self.send(job)
            self.facts = self.receive()
        except BaseException:
            end_group(self._process, _END_S, signal.SIGKILL)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end_group(self._process, _END_S)

    def send(self, value: Mapping[str, Any]) -> None:
        """Send a line; raises what ``failure`` makes if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended_early() from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next reply; raises what ``failure`` makes if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended_early()
        value: dict[str, Any] = json.loads(line)
        return value

    def _ended_early(self) -> MeridianError:
        return self._failure(f"the engine ended before it was done. {log_tail(self._log)}")


def end_group(
    process: "subprocess.Popen[Any]", limit_s: float, number: signal.Signals = signal.SIGTERM
) -> None:
    """End a process that leads its group, and all that it started: signal, wait, kill.

    Args:
        process: the leader.
        limit_s: how long to wait for it.
        number: signal sent first.
    """
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
    """The path of a child's log and its last lines, as text."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"Its log is {log}; the last lines:", *lines])


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
