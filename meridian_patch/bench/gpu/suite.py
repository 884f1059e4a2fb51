"""Runs parts one after the other, each within its share of the time, and records their results."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.summary import Spread
from meridian_patch.errors import BenchError, MeridianError

Verdict = Literal["passed", "failed", "skipped", "not run"]
PASSED: Verdict = "passed"
FAILED: Verdict = "failed"
SKIPPED: Verdict = "skipped"
NOT_RUN: Verdict = "not run"
_MINUTE_S = 60


class SkippedError(MeridianError):
    """A part cannot run here; the message says why."""


@dataclass(frozen=True)
class Context:
    """What all parts share.

    Attributes:
        model: directory or hub name of the served model.
        settings: of servers of that model.
        is_tiny: the model is the packaged tiny reasoner.
        is_dummy: the model has random weights and never ends a thought by itself.
        rehearse: tiny sizes; figures say nothing.
        accelerator: name of the GPU; None on a CPU.
        folder: takes the report and all logs.
        checkout: root of the repository; None where only the package is installed.
        base_env: environment of this process before vLLM was imported.
        command: as typed.
    """

    model: Path | str
    settings: ServerSettings
    is_tiny: bool
    is_dummy: bool
    rehearse: bool
    accelerator: str | None
    folder: Path
    checkout: Path | None
    base_env: dict[str, str]
    command: str


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
        share: of the suite's time.
        run: fills the record, given the seconds left; returns what it did, in a sentence.
            A ``BenchError`` is a failure, a ``SkippedError`` a reason not to run.
    """

    name: str
    shows: str
    share: float
    run: Callable[[Context, Record, Callable[[], float]], str]


def run_suite(
    context: Context, parts: Sequence[Part], minutes: float, console: Console
) -> tuple[list[Record], bool]:
    """Run all parts; a part that fails does not end the others.

    Args:
        context: for the parts.
        parts: in order; their shares add up to 1.
        minutes: of all parts together.
        console: shows the part under way and the time that is left for it.

    Returns:
        A record per part, and whether Ctrl-C ended the suite: later parts were then not run.
    """
    total_s = minutes * _MINUTE_S
    records = [Record(part.name, part.shows, part.share * total_s) for part in parts]
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), _TimeLeft(), console=console, transient=True
    )
    with progress:
        for part, record in zip(parts, records, strict=True):
            console.print(f"{part.name}: at most {record.limit_s / _MINUTE_S:.1f} min")
            task = progress.add_task(part.name, total=record.limit_s)
            was_interrupted = _run_part(context, part, record)
            progress.remove_task(task)
            _print_result(record, console)
            if was_interrupted:
                return records, True
    return records, False


def _run_part(context: Context, part: Part, record: Record) -> bool:
    """Run one part within its time; True on Ctrl-C."""
    begin = time.monotonic()
    alarm = _Alarm(record.limit_s)

    def remaining_s() -> float:
        return max(0.0, record.limit_s - (time.monotonic() - begin))

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
