"""Child processes: started with a log, ended with all that they started; engines on JSON lines."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from meridian_patch import envs
from meridian_patch.errors import MeridianError

LOG_TAIL_LINES = 20
_END_S = 30.0


class Child:
    """A process that leads a group of its own and prints into a log.

    As a context it is started on entry, and ended with all that it started on exit.

    Args:
        arguments: command line.
        env: complete environment.
        log: file that takes what it prints; the first start empties it, later ones append.
        stop_limit_s: how long it may take to end before it is killed.
        folder: working directory; None: that of this process.
        has_pipes: standard input and output are pipes of text, and only errors go to the log.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        stop_limit_s: float,
        *,
        folder: Path | None = None,
        has_pipes: bool = False,
    ) -> None:
        self.log = log
        self._arguments = arguments
        self._env = env
        self._stop_limit_s = stop_limit_s
        self._folder = folder
        self._has_pipes = has_pipes
        self._process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        """Start it; one that was started before has ended."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb" if self._process is None else "ab") as sink:
            self._process = subprocess.Popen(
                list(self._arguments),
                env=dict(self._env),
                cwd=self._folder,
                stdin=subprocess.PIPE if self._has_pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._has_pipes else sink,
                stderr=sink,
                text=self._has_pipes,
                # Its own group: Ctrl-C reaches us alone, and we end the whole group. But not its
                # own session: Linux' autogroup gives each session its own share of a core, and
                # beside a server's spinning worker its client then waited up to half a second.
                process_group=0,
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Id of the process, which is also that of its group."""
        return self._started.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        code: int | None = self._started.poll()
        return code

    def wait(self, limit_s: float) -> int | None:
        """Exit code; None where it runs longer than this."""
        try:
            code: int = self._started.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        return code

    @property
    def pipes(self) -> tuple[IO[str], IO[str]]:
        """Its standard input and output."""
        assert self._started.stdin is not None
        assert self._started.stdout is not None
        return self._started.stdin, self._started.stdout

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it and all that it started: signal, wait, kill. Nothing where it was not started.

        Args:
            number: signal sent first.
        """
        if self._process is None:
            return
        self.send_signal(number)
        try:
            self._process.wait(self._stop_limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Its children may outlive it.
            self.send_signal(signal.SIGKILL)
            self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it and all that it started and that runs."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    @property
    def _started(self) -> "subprocess.Popen[Any]":
        if self._process is None:
            raise MeridianError("a process is used that was not started")
        return self._process


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
        self._failure = failure
        env = {n: v for n, v in envs.environment().items() if not n.startswith(envs.PREFIX)}
        # The class reaches into the scheduler, so that the engine core is in its process.
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables}
        # -P keeps the working directory off sys.path: vLLM would take a folder named
        # triton_kernels there for the package it knows under that name.
        arguments = [sys.executable, "-P", "-m", "meridian_patch.bench.engine_main", engine_class]
        self._child = Child(arguments, env, log, _END_S, has_pipes=True)
        self._child.start()
        try:
            self.send(job)
            self.facts = self.receive()
        except BaseException:
            self._child.stop(signal.SIGKILL)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def send(self, value: Mapping[str, Any]) -> None:
        """Send a line; raises what ``failure`` makes if the process has ended."""
        pipe, _ = self._child.pipes
        try:
            pipe.write(json.dumps(value) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._ended_early() from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next reply; raises what ``failure`` makes if the process has ended."""
        _, pipe = self._child.pipes
        line = pipe.readline()
        if not line:
            raise self._ended_early()
        value: dict[str, Any] = json.loads(line)
        return value

    def _ended_early(self) -> MeridianError:
        return self._failure(f"the engine ended before it was done. {log_tail(self._child.log)}")


def log_tail(log: Path) -> str:
    """The path of a child's log and its last lines, as text."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"Its log is {log}; the last lines:", *lines])
