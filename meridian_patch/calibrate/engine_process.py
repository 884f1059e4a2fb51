"""The engine of a calibration, as a child process."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from meridian_patch.bench.child import EngineChild
from meridian_patch.errors import CalibrationError

_ENGINE = "meridian_patch.calibrate.engine:CalibrationEngine"
_VARIABLES = {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": ""}
# Keeps the engine busy with few requests waiting in it.
_REQUESTS_PER_SEAT = 2


class EngineRequest(NamedTuple):
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

    def run(self, requests: Iterable[EngineRequest]) -> Iterator[tuple[str, Reply]]:
        """Replies with their keys as they come."""
        ...

    def pace(self) -> Mapping[str, int]:
        """Fields of ``Lag`` that are the engine's."""
        ...


class EngineProcess:
    """A stock vLLM engine in a process of its own, started for the first request.

    Thoughts must come to their natural end whatever is configured here, so the engine is stock; its
    model runners have the tap of a patched server.

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
        self._child: EngineChild | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.__exit__()

    def run(self, requests: Iterable[EngineRequest]) -> Iterator[tuple[str, Reply]]:
        """Replies with their keys as they come.

        Raises:
            CalibrationError: the engine did not start, or ended; the message holds its last lines.
        """
        rest = iter(requests)
        first = next(rest, None)
        if first is None:
            return
        child, waiting, pending = self._started(), chain([first], rest), 0
        for request in islice(waiting, _REQUESTS_PER_SEAT * child.facts["max_num_seqs"]):
            child.send(request._asdict())
            pending += 1
        while pending:
            reply = child.receive()
            pending -= 1
            for request in islice(waiting, 1):
                child.send(request._asdict())
                pending += 1
            yield reply["key"], Reply(reply["ids"], reply["entropies"])

    def pace(self) -> Mapping[str, int]:
        """Fields of ``Lag`` that are the engine's; starts it if it does not run yet.

        Raises:
            CalibrationError: the engine did not start; the message holds its last lines.
        """
        pace: dict[str, int] = self._started().facts["pace"]
        return pace

    def _started(self) -> EngineChild:
        if self._child is None:
            self._child = EngineChild(_ENGINE, self._job, _VARIABLES, self._log, CalibrationError)
        return self._child
