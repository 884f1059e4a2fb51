"""``meridian bench exit-trace``: draws what early exit saw along thoughts, from an exit.trace."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from meridian_patch.bench.options import read_whole
from meridian_patch.config.json_text import lines_of, parse_json
from meridian_patch.config.validate import shown
from meridian_patch.errors import BenchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_ENTROPY, _VARIANCE = "#0072B2", "#D55E00"
# Lowest value drawn, in nats squared: a logarithmic axis has no 0.
_LEAST_VARIANCE = 1e-6

# One line of the file; docs/exit-trace.md lists its fields.
Event = Mapping[str, Any]
# The types of the fields that are drawn: of all events, and of two kinds of them.
_FIELDS: Mapping[str, tuple[type, ...]] = {
    "event": (str,),
    "request": (str,),
    "thought": (int,),
    "think_tokens": (int,),
}
_FIELDS_OF: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "probe": dict.fromkeys(("entropy_nats", "variance_nats2"), (int, float, NoneType)),
    "verdict": {"reason": (str,)},
}
_ABSENT = object()


def add_exit_trace(benches: Any) -> None:
    """Add ``exit-trace`` to the subcommands of ``meridian bench``."""
    command = benches.add_parser(
        "exit-trace",
        help="plots a file of exit.trace",
        description="Draws entropy and EAT's variance over the think tokens of the thoughts with "
        "most probes, with verdict and end.",
    )
    command.add_argument("trace", type=Path, help="file that exit.trace named")
    command.add_argument("--thoughts", default="6", help="how many (default: 6)")
    command.add_argument("--out", type=Path, default=Path("out/exit-trace.png"), help="picture")
    command.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    most = read_whole("--thoughts", parsed.thoughts)
    thoughts = [each for each in read_trace(parsed.trace) if _of_kind("probe", each)]
    if not thoughts:
        raise BenchError(
            f"{parsed.trace} holds no probe, expected a trace of an engine with exit.eat on"
        )
    chosen = sorted(thoughts, key=lambda each: -len(_of_kind("probe", each)))[:most]
    caption = f"{len(chosen)} of {len(thoughts)} probed thoughts of {parsed.trace.name}"
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    parsed.out.write_bytes(_plot(chosen, caption))
    print(f"wrote {parsed.out}")
    return 0


def read_trace(path: Path) -> list[list[Event]]:
    """Read the events of each thought, in the order of the file.

    Raises:
        BenchError: the file cannot be read, or a line is not an event; names the line.
    """
    try:
        lines = lines_of(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    thoughts: dict[tuple[str, int], list[Event]] = {}
    for number, line in lines:
        try:
            event = _event_of(line)
        except ValueError as error:
            raise BenchError(
                f"{path}, line {number} is {line[:60]!r}, expected an event of exit.trace: {error}"
            ) from error
        thoughts.setdefault((event["request"], event["thought"]), []).append(event)
    return list(thoughts.values())


def _event_of(line: str) -> Event:
    """One event with all fields that are drawn; ValueError says what is wrong."""
    event = parse_json(line)
    if not isinstance(event, dict):
        raise ValueError("not an object")  # noqa: TRY004 - one kind of error for a line
    for name, kinds in _FIELDS.items():
        _check(event, name, kinds)
    for name, kinds in _FIELDS_OF.get(event["event"], {}).items():
        _check(event, name, kinds)
    return event


def _check(event: Event, name: str, kinds: tuple[type, ...]) -> None:
    # The type itself: a bool is an int in Python.
    if type(event.get(name, _ABSENT)) not in kinds:
        value = shown(event[name]) if name in event else "missing"
        raise ValueError(f"field {name} is {value}")


def _of_kind(kind: str, thought: Sequence[Event]) -> list[Event]:
    return [event for event in thought if event["event"] == kind]


def _plot(thoughts: Sequence[Sequence[Event]], caption: str) -> bytes:
    """One panel per thought, as PNG."""
    from matplotlib.figure import Figure

    from meridian_patch.bench.plots import finish_axes, to_png

    columns = min(_COLUMNS, len(thoughts))
    rows = math.ceil(len(thoughts) / columns)
    figure = Figure(figsize=(4.3 * columns, 2.8 * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for thought, axes in zip(thoughts, panels, strict=False):
        _draw(axes, thought)
        # The caller's id: vLLM appends a random ending.
        request, number = thought[0]["request"], thought[0]["thought"]
        finish_axes(figure, axes, f"{request.rpartition('-')[0] or request}, thought {number}")
    for axes in panels[len(thoughts) :]:
        axes.set_visible(False)
    return to_png(figure, caption)


def _draw(axes: "Axes", thought: Sequence[Event]) -> None:
    probes = _of_kind("probe", thought)
    tokens = [probe["think_tokens"] for probe in probes]
    # Null, for a figure that is not a number, becomes NaN: a gap in the line.
    entropies, variances = (
        [math.nan if probe[field] is None else probe[field] for probe in probes]
        for field in ("entropy_nats", "variance_nats2")
    )
    axes.plot(tokens, entropies, "o-", ms=2.5, lw=1, color=_ENTROPY)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("think tokens", fontsize=8)
    axes.set_ylabel("entropy, nats", fontsize=8, color=_ENTROPY)
    for event in _of_kind("verdict", thought):
        label = f"verdict: {event['reason']}"
        axes.axvline(event["think_tokens"], color="#CC79A7", lw=1.6, label=label)
    for event in _of_kind("end", thought):
        axes.axvline(event["think_tokens"], color="#444444", lw=1, ls=":", label="end")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)
    right = axes.twinx()
    shown = [max(value, _LEAST_VARIANCE) for value in variances]
    right.plot(tokens, shown, color=_VARIANCE, lw=1.2, alpha=0.8)
    right.set_yscale("log")
    right.set_ylabel("EAT's variance, nats²", fontsize=8, color=_VARIANCE)
    right.spines[["top"]].set_visible(False)
