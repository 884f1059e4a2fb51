"""Runs parts one after the other, each within its share of the time, and records their results."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.statistics import Spread
from meridian_patch.errors import BenchError, MeridianError

Verdict = Literal["passed", "failed", "skipped", "not run"]
PASSED: Verdict = "passed"
FAILED: Verdict = "failed"
SKIPPED: Verdict = "skipped"
NOT_RUN: Verdict = "not run"
# vLLM's options for each of two servers that share a GPU.
HALF_OF_THE_GPU = ("--gpu-memory-utilization", "0.44")
_MINUTE_S = 60
_RECORDING_S = 5.0


class SkippedError(MeridianError):
    """A part cannot run here; the message says why."""


@dataclass(frozen=True)
class Served:
    """A model as a server runs it.

    Attributes:
        model: directory.
        settings: of servers of that model.
        is_tiny: the model is the packaged tiny reasoner.
        is_dummy: the model has random weights and never ends a thought by itself.
    """

    model: Path
    settings: ServerSettings
    is_tiny: bool = False
    is_dummy: bool = False

    def with_options(self, *options: str) -> "Served":
        """The same model on servers with further options of vLLM."""
        return replace(
            self, settings=replace(self.settings, extra=(*self.settings.extra, *options))
        )


@dataclass(frozen=True)
class Context:
    """What all parts share.

    Attributes:
        thinking: ends its thoughts by itself; for parts about what requests get.
        sized: for parts about time. The same model, unless only the sizes are those of a real one.
        rehearse: tiny sizes; figures say nothing.
        accelerator: name of the GPU; None on a CPU.
        folder: takes the report and all logs.
        checkout: folder with ``tests/kernels`` and ``scripts``; None where there is none.
        base_env: environment of this process before vLLM was imported.
        command: as typed.
        surprises: what differs from the machine that the suite expects, a sentence each.
        is_eager: engines compile nothing and capture no graph.
    """

    thinking: Served
    sized: Served
    rehearse: bool
    accelerator: str | None
    folder: Path
    checkout: Path | None
    base_env: dict[str, str]
    command: str
    surprises: tuple[str, ...] = ()
    is_eager: bool = False

    def eager(self) -> "Context":
        """The same with servers and engines that compile nothing and capture no graph."""
        models = (each.with_options("--enforce-eager") for each in (self.thinking, self.sized))
        thinking, sized = models
        return replace(self, thinking=thinking, sized=sized, is_eager=True)


@dataclass(frozen=True)
class Figure:
    """One figure of a part, with its spread."""

    name: str
    unit: str
    spread: Spread


@dataclass
class Record:
    """What a part found, as far as it got.

    Attributes:
        name: of the part.
        shows: what a pass says, in a sentence.
        limit_s: its share of the time.
        verdict: ``not run`` until it has ended.
        reason: why it failed, was skipped or was not run; what it did where it passed.
        seconds: that it took.
        figures: in the order found.
        notes: sentences for the reader.
    """

    name: str
    shows: str
    limit_s: float
    verdict: Verdict = NOT_RUN
    reason: str = ""
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, values: Sequence[float]) -> None:
        """Add a figure: median and range of the values; nothing without values."""
        spread = Spread.of(values)
        if spread is not None:
            self.figures.append(Figure(name, unit, spread))


@dataclass(frozen=True)
class Part:
    """A part of the suite.

    Attributes:
        name: in the report and of its folder.
        shows: what a pass says, in a sentence.
        share: of the suite's time, beside the shares of the other parts.
        run: fills the record, given the seconds left; returns what it did, in a sentence.
            A ``BenchError`` is a failure, a ``SkippedError`` a reason not to run.
    """

    name: str
    shows: str
    share: float
    run: Callable[[Context, Record, Callable[[], float]], str]


def run_suite(
    context: Context,
    parts: Sequence[Part],
    minutes: float,
    console: Console,
    after_part: Callable[[Context, Sequence[Record]], Context],
) -> tuple[list[Record], bool]:
    """Run all parts; a part that fails does not end the others.

    Args:
        context: for the parts.
        parts: in order. Time that a part leaves over is shared by the parts behind it.
        minutes: of all parts together.
        console: shows the part under way and the time that is left for it.
        after_part: called with all records when a part has ended; returns the context of the
            parts behind it.

    Returns:
        A record per part, and whether Ctrl-C ended the suite: later parts were then not run.
    """
    end = time.monotonic() + minutes * _MINUTE_S
    whole = sum(part.share for part in parts)
    limits_s = [part.share / whole * minutes * _MINUTE_S for part in parts]
    records = [Record(p.name, p.shows, limit) for p, limit in zip(parts, limits_s, strict=True)]
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), _TimeLeft(), console=console, transient=True
    )
    with progress:
        for place, (part, record) in enumerate(zip(parts, records, strict=True)):
            left_s = max(0.0, end - time.monotonic())
            record.limit_s = left_s * part.share / sum(later.share for later in parts[place:])
            console.print(f"{part.name}: at most {record.limit_s / _MINUTE_S:.1f} min")
            task = progress.add_task(part.name, total=record.limit_s)
            was_interrupted = _run_part(context, part, record)
            progress.remove_task(task)
            _print_result(record, console)
            context = after_part(context, records)
            if was_interrupted:
                return records, True
    return records, False


def _run_part(context: Context, part: Part, record: Record) -> bool:
    """Run one part within its time; True on Ctrl-C."""
    begin = time.monotonic()
    alarm = _Alarm(record.limit_s)
    recording_s = min(_RECORDING_S, record.limit_s / 10)

    def remaining_s() -> float:
        # Less than the alarm leaves: a part whose own limits are over records what it has.
        return max(0.0, record.limit_s - recording_s - (time.monotonic() - begin))

    try:
        with alarm:
            record.reason = part.run(context, record, remaining_s)
        record.verdict = PASSED
    except SkippedError as error:
        record.verdict, record.reason = SKIPPED, str(error)
    except KeyboardInterrupt:
        record.verdict, record.reason = FAILED, "interrupted by Ctrl-C"
        if alarm.has_rung:
            record.reason = f"did not end within its {record.limit_s / _MINUTE_S:.1f} minutes"
    except BenchError as error:
        record.verdict, record.reason = FAILED, str(error)
    except Exception as error:
        # An error of the suite itself must not end the other parts.
        record.verdict, record.reason = FAILED, f"{type(error).__name__}: {error}"
    record.seconds = time.monotonic() - begin
    return record.verdict == FAILED and not alarm.has_rung and "Ctrl-C" in record.reason


def _print_result(record: Record, console: Console) -> None:
    style = {PASSED: "green", FAILED: "red"}.get(record.verdict, "yellow")
    line = f"{record.name}: {record.verdict} after {record.seconds / _MINUTE_S:.1f} min"
    console.print(f"{line}: {record.reason}", style=style, highlight=False, markup=False)


class _Alarm:
    """Interrupts the main thread as Ctrl-C does when the time is over."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.has_rung = False

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        self.has_rung = True
        # Not raised here: asyncio has a handler of its own for this signal and unwinds by it.
        signal.raise_signal(signal.SIGINT)


class _TimeLeft(ProgressColumn):
    """The time that is left for a part."""

    def render(self, task: Task) -> Text:
        remaining_s = max(0.0, (task.total or 0.0) - (task.elapsed or 0.0))
        minutes, seconds = divmod(int(remaining_s), _MINUTE_S)
        return Text(f"{minutes}:{seconds:02d} left")
