"""What a marathon notes: requests, faults as they happened, and samples of processes."""

from dataclasses import dataclass, field
from typing import Literal

from meridian_patch.bench.marathon.faults import Fault

Outcome = Literal["ok", "cancelled", "error"]


@dataclass
class Asked:
    """One request, as its client saw it. Times are seconds from the start of the load.

    Attributes:
        begin_s: when it was sent first.
        is_canary: whether its tokens are known.
        is_stream: whether it was streamed.
        end_s: when it ended; None while it is in flight.
        outcome: how it ended.
        why: the error, for people.
        is_equal: for a canary that ended well, whether its tokens are those of one engine.
        num_retries: how often it was sent again before its first byte came.
        num_tokens: that it got, if it ended well.
    """

    begin_s: float
    is_canary: bool
    is_stream: bool
    end_s: float | None = None
    outcome: Outcome | None = None
    why: str = ""
    is_equal: bool | None = None
    num_retries: int = 0
    num_tokens: int = 0


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
        healthy: engines that a router calls healthy; None while none can be asked.
        core_mib: resident memory of each EngineCore, by ``ROLE-PID``.
        router_mib: resident memory of all routers; None while there is none.
        router_cpu_s: processor time that all routers have taken.
    """

    at_s: float
    in_flight: int
    healthy: int | None
    core_mib: dict[str, float] = field(default_factory=dict)
    router_mib: float | None = None
    router_cpu_s: float | None = None


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
