"""The engine that calibration asks, as a child process."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from meridian_patch import envs
from meridian_patch.bench.child import JsonChild
from meridian_patch.errors import CalibrationError

_MODULE = "meridian_patch.calibrate.engine_main"
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

    def pace(self) -> Mapping[str, int]:
        """Fields of ``Lag`` that are the engine's."""
        ...


class EngineProcess:
    """A stock vLLM engine in a process of its own, started when it is first asked something.

    Stock, because thoughts are to come to their natural end whatever is configured here; its model
    runners have the tap of a patched server.

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
        self._child: JsonChild | None = None
        # Requests to keep in the engine; 0 until it has started.
        self._seats = 0
        self._pace: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._child is None:
            return
        if error is None:
            self._child.finish()
        else:
            self._child.end()

    def run(self, asks: Iterable[Ask]) -> Iterator[tuple[str, Reply]]:
        """Replies with their keys as they come.

        Raises:
            CalibrationError: the engine did not start, or ended; the message holds its last lines.
        """
        waiting = iter(asks)
        first = next(waiting, None)
        if first is None:
            return
        child = self._started()
        child.send(first._asdict())
        pending = 1
        for ask in islice(waiting, _REQUESTS_PER_SEAT * self._seats - 1):
            child.send(ask._asdict())
            pending += 1
        while pending:
            reply = child.receive()
            pending -= 1
            following = next(waiting, None)
            if following is not None:
                child.send(following._asdict())
                pending += 1
            yield reply["key"], Reply(reply["ids"], reply["entropies"])

    def pace(self) -> Mapping[str, int]:
        """Fields of ``Lag`` that are the engine's; it is started for that if need be.

        Raises:
            CalibrationError: the engine did not start; the message holds its last lines.
        """
        self._started()
        return self._pace

    def _started(self) -> JsonChild:
        if self._child is None:
            self._child = JsonChild(_MODULE, _environment(), self._log, CalibrationError)
        if not self._seats:
            self._child.send(self._job)
            told = self._child.receive()
            self._seats = int(told["max_num_seqs"])
            self._pace = {name: int(value) for name, value in told["pace"].items()}
        return self._child


def _environment() -> dict[str, str]:
    env = envs.environment()
    kept = {name: value for name, value in env.items() if not name.startswith(envs.PREFIX)}
    return kept | {
        "MERIDIAN_PATCH": "0",
        "VLLM_PLUGINS": "",
        # The scheduler is told from within the process what to measure.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
