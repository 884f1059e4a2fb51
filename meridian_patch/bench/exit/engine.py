"""The patched engine that ends thoughts, as a child process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from meridian_patch import envs
from meridian_patch.errors import BenchError

_MODULE = "meridian_patch.engine.exit_run"
_LOG_TAIL_LINES = 20
_END_S = 30.0
_SET = f"{envs.OVERRIDE_PREFIX}EXIT__"


class Ask(NamedTuple):
    """One request: a name of its own, token ids, and fields of ``SamplingParams``."""

    key: str
    prompt: Sequence[int]
    params: Mapping[str, Any]


class Reply(NamedTuple):
    """What came of a request.

    Attributes:
        key: its name.
        ids: output tokens.
        finish_reason: as vLLM says it.
        told: what the caller is told of the thought; empty while none has ended.
        forced: output indices of tokens that a mask of ours decided.
    """

    key: str
    ids: list[int]
    finish_reason: str
    told: Mapping[str, Any]
    forced: list[int]


class ExitEngineProcess:
    """A patched vLLM engine in a process of its own, for arm after arm.

    Args:
        arguments: of ``vllm.LLM``.
        reasoning: start and end marker for vLLM's own thinking budget; None: not used.
        concurrency: most requests at a time.
        settings: of section ``exit``, in place of what the profile says.
        profile: configuration file.
        log: file that takes what the engine prints.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        reasoning: tuple[str, str] | None,
        concurrency: int,
        settings: Mapping[str, str],
        profile: Path,
        log: Path,
    ) -> None:
        self._log = log
        # By event, what the last arm did in the engine.
        self.totals: dict[str, int] = {}
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                # -P keeps the working directory off sys.path: vLLM would take a folder named
                # triton_kernels there for the package it knows under that name.
                [sys.executable, "-P", "-m", _MODULE],
                env=_environment(settings, profile),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                # Its own group: Ctrl-C reaches us alone, and we end the whole group.
                process_group=0,
            )
        try:
            job = {"engine": dict(arguments), "reasoning": reasoning, "concurrency": concurrency}
            self._send(job)
            self._receive()
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(signal.SIGTERM)

    def run(self, asks: Sequence[Ask]) -> Iterator[Reply]:
        """Replies as they come; ``totals`` are those of this arm when it has ended.

        Raises:
            BenchError: the engine ended; the message holds its last lines.
        """
        self._send({"requests": [ask._asdict() for ask in asks]})
        for _ in asks:
            yield Reply(**self._receive())
        self.totals = self._receive()["totals"]

    def _send(self, value: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failure(self) -> BenchError:
        tail = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        what = f"the engine ended before it was done. Its log is {self._log}; the last lines:"
        return BenchError("\n".join([what, *tail]))

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        _signal(process.pid, number)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _signal(process.pid, signal.SIGKILL)
            process.wait()


def _environment(settings: Mapping[str, str], profile: Path) -> dict[str, str]:
    env = envs.environment()
    kept = {name: value for name, value in env.items() if not name.startswith(envs.PREFIX)}
    kept |= {f"{_SET}{name.upper()}": value for name, value in settings.items()}
    return kept | {
        "MERIDIAN_PATCH": "1",
        "MERIDIAN_PATCH_CONFIG": str(profile.resolve()),
        "VLLM_PLUGINS": envs.PLUGIN_NAME,
        # The scheduler is watched from within the process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads of a second OpenMP worker spin against whatever else runs.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
