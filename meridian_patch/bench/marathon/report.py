"""The report of a marathon: a page, its data, and a plot."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meridian_patch.bench.marathon.plots import plot_timeline
from meridian_patch.bench.marathon.run import Result, Settings
from meridian_patch.bench.marathon.verdict import (
    Check,
    Window,
    growth_of,
    judge,
    router_us_per_token,
    windows_of,
)
from meridian_patch.bench.report import write_json

# Lines of logs and kinds of errors that the page shows.
_MOST_SHOWN = 20


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
    checks = judge(
        result.asked,
        result.injected,
        result.samples,
        result.lines,
        {fault.kind for fault in settings.faults},
        result.warmed,
    )
    windows = windows_of(result.injected, result.asked)
    write_json(folder / "report.json", _data(settings, result, checks, windows))
    lines = [json.dumps(asdict(each)) + "\n" for each in result.asked]
    (folder / "requests.jsonl").write_text("".join(lines))
    (folder / "timeline.png").write_bytes(plot_timeline(result, origin))
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
    way = "A think engine and an answer engine" if settings.hands_off else "Two engines"
    setting = (
        f"{way} behind {settings.num_routers} of `meridian route`; "
        f"{settings.concurrency} clients that wait {settings.pause_s:g} s between requests, and "
        f"bursts of half as many, for {settings.length_s / 60:g} minutes. "
        f"{len(result.asked)} requests: "
        f"{outcomes['ok']} ended well, {outcomes['error']} failed, {outcomes['cancelled']} were "
        f"cancelled by their clients. {retries} times a client sent a request again before a "
        "response began, at most twice each."
    )
    cost_us = router_us_per_token(result.samples, result.asked)
    if cost_us is not None:
        tokens = sum(each.num_tokens for each in result.asked)
        setting += (
            f" The routers took {cost_us:.0f} µs of processor time for each of {tokens} tokens."
        )
    verdict = f"Failed: {failed} of {len(checks)} demands" if failed else "Passed"
    lines = ["# Marathon", "", origin, "", setting, "", f"**{verdict}.**", ""]
    lines += ["| demand | limit | measured | |", "|---|---|---|---|"]
    lines += map(_check_row, checks)
    lines += ["", "![over time](timeline.png)", "", "## Faults", ""]
    lines += [
        "| at s | fault | strikes | requests | errors | service recovers s | process back s | |",
        "|---|---|---|---|---|---|---|---|",
    ]
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
    return (
        f"| {injected.begin_s:.0f} | {fault.shape.title} | {fault.strikes} | {window.num_requests} "
        f"| {window.num_errors} ({window.error_share:.1%}) | {recovered} | {back} "
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
            "hands_off": settings.hands_off,
            "num_routers": settings.num_routers,
            "seed": settings.seed,
        },
        "checks": [asdict(check) for check in checks],
        "faults": [
            {
                **asdict(window.injected),
                "requests": window.num_requests,
                "errors": window.num_errors,
                "recovery_s": window.recovery_s,
            }
            for window in windows
        ],
        "outcomes": Counter(str(each.outcome) for each in result.asked),
        "router_us_per_token": router_us_per_token(result.samples, result.asked),
        "router_handoffs": result.num_moved,
        "errors": [asdict(each) for each in result.asked if each.outcome == "error"],
        "growth": dict(growth_of(result.samples, result.warmed)),
        "samples": [asdict(sample) for sample in result.samples],
        "log_lines": [asdict(line) for line in result.lines],
    }
