"""The engine that calibration asks, as a child process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol, Self

from meridian_patch import envs
from meridian_patch.errors import CalibrationError

_MODULE = "meridian_patch.engine.calibration_run"
_LOG_TAIL_LINES = 20
_END_S = 30.0
# The engine never waits for a request, and few wait in it.
_REQUESTS_PER_SEAT = 2


class Ask(NamedTuple):
    """One request.

    Attributes:
        key: names the reply.
        prompt: token ids.
        max_tokens: to be sampled; None: as many as there is room for.
        is_measured: entropies of the sampled tokens are wanted.
    """

    key: str
    prompt: list[int]
    max_tokens: int | None
    is_measured: bool


class Reply(NamedTuple):
    """What came of a request.

    Attributes:
        ids: sampled tokens; None when the prompt left no room for one.
        entropies: of these tokens, in nats; None where they were not measured.
    """

    ids: list[int] | None
    entropies: list[float] | None


class Engine(Protocol):
    """Answers requests, in any order."""

    def run(self, asks: Iterable[Ask]) -> Iterator[tuple[str, Reply]]:
        """Replies with their keys as they come."""
        ...


class EngineProcess:
    """A stock vLLM engine in a process of its own, started when it is first asked something.

    Stock, because thoughts are to come to their natural end whatever is configured here.

    Args:
        arguments: of ``vllm.LLM``.
        sampling: fields of ``SamplingParams`` that stand in for the model's own.
        log: file that takes what the engine prints.
    """

    def __init__(
        self, arguments: Mapping[str, Any], sampling: Mapping[str, Any], log: Path
    ) -> None:
        self._job = {"engine": dict(arguments), "sampling": dict(sampling)}
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        # Requests to keep in the engine; 0 until it has started.
        self._seats = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is None:
            return
        if error is None and process.stdin is not None:
            process.stdin.close()
        else:
            _signal(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Its engine core may outlive it.
            _signal(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, asks: Iterable[Ask]) -> Iterator[tuple[str, Reply]]:
        """Replies with their keys as they come.

        Raises:
            CalibrationError: the engine did not start, or ended; the message holds its last lines.
        """
        waiting = iter(asks)
        first = next(waiting, None)
        if first is None:
            return
        source, sink = self._started()
        self._send(sink, first)
        pending = 1
        for ask in islice(waiting, _REQUESTS_PER_SEAT * self._seats - 1):
            self._send(sink, ask)
            pending += 1
        while pending:
            reply = self._receive(source)
            pending -= 1
            following = next(waiting, None)
            if following is not None:
                self._send(sink, following)
                pending += 1
            yield reply["key"], Reply(reply["ids"], reply["entropies"])

    def _started(self) -> tuple[IO[str], IO[str]]:
        if self._process is None:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    # -P keeps the working directory off sys.path: vLLM would take a folder named
                    # triton_kernels there for the package it knows under that name.
                    [sys.executable, "-P", "-m", _MODULE],
                    env=_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    # Its own group: Ctrl-C reaches us alone, and we end the whole group.
                    process_group=0,
                )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        if not self._seats:
            self._write(process.stdin, self._job)
            self._seats = int(self._receive(process.stdout)["max_num_seqs"])
        return process.stdout, process.stdin

    def _send(self, sink: IO[str], ask: Ask) -> None:
        self._write(sink, ask._asdict())

    def _write(self, sink: IO[str], value: Mapping[str, Any]) -> None:
        try:
            sink.write(json.dumps(value) + "\n")
            sink.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _receive(self, source: IO[str]) -> dict[str, Any]:
        line = source.readline()
        if not line:
            raise self._failure()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failure(self) -> CalibrationError:
        tail = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        what = f"the engine ended before it was done. Its log is {self._log}; the last lines:"
        return CalibrationError("\n".join([what, *tail]))


def _environment() -> dict[str, str]:
    env = envs.environment()
    kept = {name: value for name, value in env.items() if not name.startswith(envs.PREFIX)}
    return kept | {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": ""}


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
