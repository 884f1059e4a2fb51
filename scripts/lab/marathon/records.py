"""What a marathon does, and what it notes: requests, faults, and samples of processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from marathon.faults import Fault

Outcome = Literal["ok", "cancelled", "error", "lost"]


@dataclass(frozen=True)
class Settings:
    """What a marathon does.

    Attributes:
        model: folder of the model.
        length_s: of the load.
        concurrency: clients.
        pause_s: between two requests of a client.
        faults: to inject.
        seed: of all choices.
    """

    model: Path
    length_s: float
    concurrency: int
    pause_s: float
    faults: Sequence[Fault]
    seed: int


@dataclass
class Asked:
    """One request, as its client saw it. Times are seconds from the start of the load.

    Attributes:
        begin_s: when it was sent first.
        is_canary: whether its tokens are known.
        is_stream: whether it was streamed.
        end_s: when it ended; None while it is in flight.
        outcome: how it ended; ``lost`` with its think server.
        why: the error, for people.
        is_cut: whether its response began and broke off.
        is_equal: for a canary that ended well, whether its tokens are those of one engine.
        num_retries: how often it was sent again before its first byte came.
    """

    begin_s: float
    is_canary: bool
    is_stream: bool
    end_s: float | None = None
    outcome: Outcome | None = None
    why: str = ""
    is_cut: bool = False
    is_equal: bool | None = None
    num_retries: int = 0


@dataclass
class Injected:
    """A fault as it happened.

    Attributes:
        fault: as planned.
        begin_s: when it began.
        back_s: when the process that it killed was healthy again; None if it killed none.
        must_return: whether it killed a process.
        note: what else is worth a line in the report.
    """

    fault: Fault
    begin_s: float
    back_s: float | None = None
    must_return: bool = False
    note: str = ""

    @property
    def end_s(self) -> float:
        """When its window ends."""
        return self.begin_s + self.fault.shape.window_s


@dataclass(frozen=True)
class Sample:
    """The state of all processes at one moment.

    Attributes:
        at_s: seconds from the start of the load.
        in_flight: requests that clients wait for.
        num_healthy: engines that answer ``/health``.
        core_mib: resident memory of each EngineCore, by ``ENGINE-PID``.
    """

    at_s: float
    in_flight: int
    num_healthy: int
    core_mib: Mapping[str, float]


@dataclass(frozen=True)
class LogLine:
    """A line of a log that must not be there, or that is known and harmless.

    Attributes:
        log: name of the file.
        text: of the line.
        known: why it is harmless; empty if it is forbidden.
    """

    log: str
    text: str
    known: str = ""


@dataclass
class Result:
    """What a marathon noted.

    Attributes:
        asked: all requests.
        injected: all faults.
        samples: of processes, in order of time.
        lines: of logs, forbidden ones and known ones.
        warmed: when each EngineCore had served alone, by ``ENGINE-PID``.
        handoffs: what became of requests after their thought, by outcome, as think servers counted
            it since each was started last.
    """

    asked: list[Asked] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lines: list[LogLine] = field(default_factory=list)
    warmed: dict[str, float] = field(default_factory=dict)
    handoffs: dict[str, int] = field(default_factory=dict)
