"""Plots of a served comparison, as PNG."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from meridian_patch.bench.plots import arm_styles, finish_axes, to_png
from meridian_patch.bench.served.metrics import PAUSE_S, STALL_S, RequestTimes, request_times
from meridian_patch.bench.served.summary import SeedRun

_PHASE_COLOURS = {
    "waiting, prefill": "#DDDDDD",
    "thinking": "#56B4E9",
    "thinking, paused": "#D3EAF8",
    "answering": "#009E73",
    "answer stalled": "#D55E00",
}
_FLOWS, _STANDS = "#B9DDCF", "#D55E00"
# Gaps above this are drawn large: there are few of them, and they are what is looked for.
_STANDS_OUT_MS = 100.0

Runs = Mapping[str, SeedRun]


def answers_as_read(runs: Runs, caption: str) -> bytes:
    """One line per answer, from its first token on; where it stood still is marked; by arm."""
    answers = {arm: _answers(run) for arm, run in runs.items()}
    rows = max(map(len, answers.values()), default=1)
    figure = Figure(figsize=(3.6 * len(runs), max(2.4, min(6.0, 1.4 + 0.03 * rows))))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (arm, times) in zip(panels, answers.items(), strict=True):
        stood_s = 0.0
        for row, one in enumerate(times):
            first_s = one.submit_s + (one.ttfat_s or 0.0)
            length_s = one.submit_s + one.e2e_s - first_s
            axes.broken_barh([(0.0, length_s)], (row - 0.3, 0.6), facecolors=_FLOWS, lw=0)
            pauses = [
                (end - gap - first_s, gap)
                for gap, end in zip(one.answer_gaps_s, one.answer_gap_ends_s, strict=True)
                if gap > PAUSE_S
            ]
            stood_s += sum(gap for _, gap in pauses)
            axes.broken_barh(pauses, (row - 0.5, 1.0), facecolors=_STANDS, lw=0)
        finish_axes(figure, axes, f"{arm}: stood still for {stood_s:,.1f} s")
        axes.set_xlabel("seconds since the answer began")
        axes.grid(axis="y", visible=False)
        axes.set_yticks([])
    panels[0].set_ylabel("answers, the longest on top")
    panels[0].set_xlim(left=0)
    panels[0].invert_yaxis()
    figure.legend(
        handles=[
            Patch(color=_FLOWS, label="text comes"),
            Patch(color=_STANDS, label=f"stands still for more than {PAUSE_S * 1000:.0f} ms"),
        ],
        loc="outside upper center",
        ncols=2,
        frameon=False,
    )
    return to_png(figure, caption)


def gap_timeline(runs: Runs, caption: str) -> bytes:
    """Each answer gap over the time it ended, one colour per arm."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    axes = figure.subplots()
    handles = []
    for arm, (colour, marker) in arm_styles(runs).items():
        times = _times(runs[arm])
        ends = [end for t in times for end in t.answer_gap_ends_s]
        gaps = np.array([gap * 1000 for t in times for gap in t.answer_gaps_s])
        worst = f"{arm}, worst {gaps.max():,.0f} ms" if gaps.size else arm
        sizes = np.where(gaps > _STANDS_OUT_MS, 40, 7)
        axes.scatter(ends, gaps, s=sizes, alpha=0.6, marker=marker, color=colour, lw=0)
        handles.append(Line2D([], [], marker=marker, color=colour, lw=0, ms=7, label=worst))
    axes.axhline(STALL_S * 1000, color="#444444", lw=0.9, ls="--")
    axes.text(
        1.0, STALL_S * 1000, " stall", transform=axes.get_yaxis_transform(), va="center", size=9
    )
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5)
    axes.yaxis.set_major_formatter(FuncFormatter(_plain_milliseconds))
    axes.set_xlabel("time since the start of the trace (s)")
    axes.set_ylabel("gap between two answer tokens (ms)")
    figure.legend(handles=handles, loc="outside upper right", frameon=False, ncols=len(runs))
    finish_axes(figure, axes, "Answer gaps: what a reader waits in the middle of an answer")
    return to_png(figure, caption)


def phase_bars(runs: Runs, caption: str) -> bytes:
    """One bar per request: waiting, thinking, answering, stalls; one panel per arm."""
    rows = max((len(run.records) for run in runs.values()), default=1)
    figure = Figure(
        figsize=(max(11, 5 * len(runs)), max(3.6, min(11.0, 1.6 + 0.085 * rows))),
        layout="constrained",
    )
    panels = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (arm, run) in zip(panels, runs.items(), strict=True):
        ordered = sorted(run.records, key=lambda record: record.submit_s)
        for row, record in enumerate(ordered):
            times = request_times(record, run.end_marker)
            if times is not None:
                _draw_bar(axes, row, times, record.token_s)
        axes.set_xlabel("time since the start of the trace (s)")
        finish_axes(figure, axes, f"{arm}: {_count_stalls(_times(run))}")
        axes.grid(axis="y", visible=False)
    panels[0].set_ylabel("request, by arrival")
    panels[0].invert_yaxis()
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in _PHASE_COLOURS.items()],
        loc="outside upper center",
        ncols=len(_PHASE_COLOURS),
        frameon=False,
    )
    return to_png(figure, caption)


def distributions(runs: Runs, caption: str) -> bytes:
    """Tail of the answer gaps, and how soon answers begin."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = arm_styles(runs)
    for arm, run in runs.items():
        times = _times(run)
        style: dict[str, Any] = {"color": styles[arm][0], "lw": 2.0}
        gaps = np.sort([gap * 1000 for t in times for gap in t.answer_gaps_s])
        if gaps.size:
            # From every gap longer than the one before down to the single longest.
            left.step(gaps, np.arange(gaps.size, 0, -1) / gaps.size, where="post", **style)
        ttfat = np.sort([t.ttfat_s for t in times if t.ttfat_s is not None])
        if ttfat.size:
            right.step(ttfat, np.arange(1, ttfat.size + 1) / ttfat.size, where="post", **style)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlim(left=0.5)
    left.axvline(STALL_S * 1000, color="#444444", lw=0.9, ls="--")
    left.xaxis.set_major_formatter(FuncFormatter(_plain_milliseconds))
    left.set_xlabel("answer gap (ms)")
    left.set_ylabel("share of gaps at least this long")
    right.set_xlabel("submit to first answer token (s)")
    right.set_ylabel("share of requests")
    right.set_xlim(left=0)
    right.set_ylim(0, 1.02)
    handles = [Line2D([], [], color=styles[arm][0], lw=2.0, label=arm) for arm in runs]
    left.legend(handles=handles, loc="upper right", frameon=False)
    finish_axes(figure, left, "Tail of the answer gaps")
    finish_axes(figure, right, "Time to first answer token (TTFAT)")
    return to_png(figure, caption)


def _draw_bar(axes: Axes, row: int, times: RequestTimes, token_s: Sequence[float]) -> None:
    first = times.submit_s + times.ttft_s
    last = times.submit_s + times.e2e_s
    boundary = times.boundary_s
    if boundary is None:  # it never stopped thinking, or never began
        boundary = last if times.ttfat_s is None else first
    pauses = [(a, b - a) for a, b in pairwise(token_s) if b - a > STALL_S and b <= boundary]
    stalls = [
        (end - gap, gap)
        for gap, end in zip(times.answer_gaps_s, times.answer_gap_ends_s, strict=True)
        if gap > STALL_S
    ]
    if times.ttot_s is not None and times.ttot_s > STALL_S:
        stalls.append((boundary, times.ttot_s))
    spans = {
        "waiting, prefill": [(times.submit_s, times.ttft_s)],
        "thinking": [(first, boundary - first)],
        "thinking, paused": pauses,
        "answering": [(boundary, last - boundary)],
        "answer stalled": stalls,
    }
    for name, ranges in spans.items():
        axes.broken_barh(ranges, (row - 0.42, 0.84), facecolors=_PHASE_COLOURS[name], lw=0)


def _count_stalls(times: Sequence[RequestTimes]) -> str:
    stalled = sum(gap > STALL_S for t in times for gap in t.answer_gaps_s)
    late = sum(t.ttot_s is not None and t.ttot_s > STALL_S for t in times)
    return f"{stalled} answer stalls, {late} answers late to begin"


def _times(run: SeedRun) -> list[RequestTimes]:
    times = (request_times(record, run.end_marker) for record in run.records)
    return [t for t in times if t is not None]


def _answers(run: SeedRun) -> list[RequestTimes]:
    """Those that have an answer, the longest first."""
    found = [t for t in _times(run) if t.ttfat_s is not None]
    return sorted(found, key=lambda t: t.e2e_s - (t.ttfat_s or 0.0), reverse=True)


def _plain_milliseconds(value: float, _position: int) -> str:
    return f"{value:g}"
