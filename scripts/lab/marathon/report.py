"""The report of a marathon: a page, its data, and a plot over time."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from marathon.faults import Engine
from marathon.records import Outcome, Result, Settings
from marathon.verdict import Check, Window, growth_of, judge, windows_of
from meridian_patch.bench.plots import finish_axes, to_png
from meridian_patch.bench.report import write_json

# Lines of logs and kinds of errors that the page shows.
_MOST_SHOWN: Final = 20
_ENGINE_COLOUR: Final[dict[Engine | str, str]] = {
    "think-1": "#0072B2",
    "think-2": "#56B4E9",
    "answer": "#D55E00",
}
_OUTCOME_COLOUR: Final[dict[Outcome, str]] = {
    "ok": "#0072B2",
    "error": "#D55E00",
    "lost": "#CC79A7",
}
_HANDOFFS: Final = ("moved", "answered_at_home", "aborted")
_SEVERAL: Final = "#555555"
_WINDOW: Final = "#F0E4C8"
# Seconds whose ends are added up into one point.
_BIN_S: Final = 5.0


def write_report(folder: Path, settings: Settings, result: Result, origin: str) -> list[Check]:
    """Write ``report.md``, ``report.json``, ``requests.jsonl`` and ``timeline.png``.

    Args:
        folder: of the report.
        settings: what was done.
        result: what was noted.
        origin: command, provenance and machine, as Markdown.

    Returns:
        All demands.
    """
    checks = judge(result, {fault.kind for fault in settings.faults})
    windows = windows_of(result.injected, result.asked)
    write_json(folder / "report.json", _data(settings, result, checks, windows))
    lines = [json.dumps(asdict(each)) + "\n" for each in result.asked]
    (folder / "requests.jsonl").write_text("".join(lines))
    (folder / "timeline.png").write_bytes(_plot(result, origin))
    (folder / "report.md").write_text(_page(settings, result, checks, windows, origin))
    return checks


def _page(
    settings: Settings,
    result: Result,
    checks: Sequence[Check],
    windows: Sequence[Window],
    origin: str,
) -> str:
    outcomes = Counter(each.outcome for each in result.asked)
    failed = sum(not check.is_met for check in checks)
    retries = sum(each.num_retries for each in result.asked)
    setting = (
        "Two think servers behind `vllm-router`, and their answer engine; "
        f"{settings.concurrency} clients that wait {settings.pause_s:g} s between requests, and "
        f"bursts of half as many, for {settings.length_s / 60:g} minutes. "
        f"{len(result.asked)} requests: "
        f"{outcomes['ok']} ended well, {outcomes['error']} failed, {outcomes['lost']} were lost "
        f"with their think server, {outcomes['cancelled']} were cancelled by their clients. "
        f"{retries} times a client sent a request again before a response began, at most twice "
        "each."
    )
    counts = {name: result.handoffs.get(name, 0) for name in _HANDOFFS}
    setting += (
        " Think servers, since each was started last: "
        + ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items())
        + "."
    )
    verdict = f"Failed: {failed} of {len(checks)} demands" if failed else "Passed"
    lines = ["# Marathon", "", origin, "", setting, "", f"**{verdict}.**", ""]
    lines += ["| demand | limit | measured | |", "|---|---|---|---|"]
    lines += map(_check_row, checks)
    lines += ["", "![over time](timeline.png)", "", "## Faults", ""]
    lines += ["| at s | fault | strikes | requests | errors | lost | recovers s | back s | |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    lines += map(_window_row, windows)
    errors = Counter(each.why for each in result.asked if each.outcome == "error")
    if errors:
        lines += ["", "## Errors", "", "| number | what the client saw |", "|---|---|"]
        lines += [f"| {number} | {why} |" for why, number in errors.most_common(_MOST_SHOWN)]
    lines += ["", "## Memory of EngineCores", "", "| process | first MiB | last MiB | growth |"]
    lines += ["|---|---|---|---|", *_memory_rows(result)]
    lines += ["", "## Logs", "", *_log_rows(result), ""]
    return "\n".join(lines)


def _check_row(check: Check) -> str:
    mark = "met" if check.is_met else "**not met**"
    return f"| {check.name} | {check.bar} | {check.value} | {mark} |"


def _window_row(window: Window) -> str:
    injected = window.injected
    fault = injected.fault
    recovered = "never" if window.recovery_s is None else f"{window.recovery_s:.1f}"
    back = "" if injected.back_s is None else f"{injected.back_s - injected.begin_s:.1f}"
    lost = (
        f"{window.num_lost} of {window.num_in_flight} in flight" if fault.kills_think_server else ""
    )
    return (
        f"| {injected.begin_s:.0f} | {fault.shape.title} | {fault.strikes} | {window.num_requests} "
        f"| {window.num_errors} ({window.error_share:.1%}) | {lost} | {recovered} | {back} "
        f"| {injected.note} |"
    )


def _memory_rows(result: Result) -> list[str]:
    growth = growth_of(result.samples, result.warmed)
    lives: dict[str, list[float]] = {}
    for sample in result.samples:
        for name, mib in sample.core_mib.items():
            lives.setdefault(name, []).append(mib)
    return [
        f"| {name} | {life[0]:.0f} | {life[-1]:.0f} "
        f"| {f'{growth[name]:+.1%}' if name in growth else 'lived too short'} |"
        for name, life in lives.items()
    ]


def _log_rows(result: Result) -> list[str]:
    if not result.lines:
        return ["No forbidden line, and no known one that looks so."]
    counts = Counter((line.log, line.known or "**forbidden**") for line in result.lines)
    rows = ["| log | lines | why harmless |", "|---|---|---|"]
    rows += [f"| {log} | {number} | {why} |" for (log, why), number in counts.items()]
    forbidden = [f"{line.log}: {line.text}" for line in result.lines if not line.known]
    if forbidden:
        rows += ["", "```", *forbidden[:_MOST_SHOWN], "```"]
    return rows


def _data(
    settings: Settings, result: Result, checks: Sequence[Check], windows: Sequence[Window]
) -> dict[str, Any]:
    return {
        "settings": {
            "length_s": settings.length_s,
            "concurrency": settings.concurrency,
            "pause_s": settings.pause_s,
            "seed": settings.seed,
        },
        "checks": [asdict(check) for check in checks],
        "faults": [
            {
                **asdict(window.injected),
                "requests": window.num_requests,
                "errors": window.num_errors,
                "lost": window.num_lost,
                "in_flight": window.num_in_flight,
                "recovery_s": window.recovery_s,
            }
            for window in windows
        ],
        "outcomes": Counter(str(each.outcome) for each in result.asked),
        "handoffs": result.handoffs,
        "errors": [asdict(each) for each in result.asked if each.outcome == "error"],
        "growth": dict(growth_of(result.samples, result.warmed)),
        "samples": [asdict(sample) for sample in result.samples],
        "log_lines": [asdict(line) for line in result.lines],
    }


def _plot(result: Result, caption: str) -> bytes:
    """PNG with four rows: faults, requests that end per second, those in flight, memory."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    rows = figure.subplots(4, 1, sharex=True, height_ratios=(2, 3, 2, 3))
    faults, ends, flight, memory = rows
    for axes in (ends, flight, memory):
        for injected in result.injected:
            axes.axvspan(injected.begin_s, injected.end_s, color=_WINDOW, zorder=0)
    _draw_faults(faults, result)
    _draw_ends(ends, result)
    flight.plot(
        [sample.at_s for sample in result.samples],
        [sample.in_flight for sample in result.samples],
        color=_SEVERAL,
        lw=1,
    )
    flight.set_ylabel("requests")
    _draw_memory(memory, result)
    memory.set_xlabel("seconds of load")
    finish_axes(figure, faults, "Faults, by what they strike")
    finish_axes(figure, ends, "Requests that ended; shaded: windows of faults")
    finish_axes(figure, flight, "In flight")
    finish_axes(figure, memory, "Resident memory of each EngineCore")
    return to_png(figure, caption.replace("`", ""))


def _draw_faults(axes: Axes, result: Result) -> None:
    """A line for each kind, with a bar for each window."""
    kinds = list(dict.fromkeys(injected.fault.kind for injected in result.injected))
    struck: set[str] = set()
    for injected in result.injected:
        strikes = injected.fault.strikes
        axes.barh(
            kinds.index(injected.fault.kind),
            injected.end_s - injected.begin_s,
            left=injected.begin_s,
            color=_ENGINE_COLOUR.get(strikes, _SEVERAL),
            label=None if strikes in struck else strikes,
        )
        struck.add(strikes)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    _name_lines(axes)


def _draw_ends(axes: Axes, result: Result) -> None:
    ends: dict[str | None, Counter[int]] = {outcome: Counter() for outcome in _OUTCOME_COLOUR}
    for each in result.asked:
        if each.outcome in ends and each.end_s is not None:
            ends[each.outcome][int(each.end_s // _BIN_S)] += 1
    num_bins = max((number for counts in ends.values() for number in counts), default=0) + 1
    begins = [number * _BIN_S for number in range(num_bins + 1)]
    for outcome, colour in _OUTCOME_COLOUR.items():
        rates = [ends[outcome][number] / _BIN_S for number in range(num_bins)]
        axes.stairs(rates, begins, color=colour, label=outcome, baseline=None)
    axes.set_ylabel("per second")
    _name_lines(axes)


def _draw_memory(axes: Axes, result: Result) -> None:
    lives: dict[str, list[tuple[float, float]]] = {}
    for sample in result.samples:
        for name, mib in sample.core_mib.items():
            lives.setdefault(name, []).append((sample.at_s, mib))
    named: set[str] = set()
    for name, life in lives.items():
        engine = name.rpartition("-")[0]
        # One name for all lives of an engine.
        label = None if engine in named else engine
        named.add(engine)
        colour = _ENGINE_COLOUR.get(engine, _SEVERAL)
        axes.plot(*zip(*life, strict=True), color=colour, lw=1, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB")
    _name_lines(axes)


def _name_lines(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=5, frameon=False)
