"""Plots of a served comparison, as PNG."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from meridian_patch.bench import plots
from meridian_patch.bench.figure_table import PAUSE_S, STALL_S, RequestTimes
from meridian_patch.bench.plots import (
    arm_styles,
    finish_axes,
    label_log_axis,
    plain_number,
    to_png,
)
from meridian_patch.bench.served.metrics import request_times
from meridian_patch.bench.served.summary import SeedRun

_WAITS, _THINKS, _ANSWERS = "waits", "thinks", "answers"
_STANDS = f"answer stands still for more than {PAUSE_S * 1000:.0f} ms"
_COLOURS = {_WAITS: "#D0D0D0", _THINKS: "#A9D3EE", _ANSWERS: "#009E73", _STANDS: "#D55E00"}
# Gaps above this are drawn large: there are few of them, and they are what is looked for.
_STANDS_OUT_MS = 100.0

Runs = Mapping[str, SeedRun]


def requests_over_time(runs: Runs, caption: str) -> bytes:
    """One line per request: it waits, thinks, answers, stands still; one panel per arm."""
    rows = _rows(runs.values())
    height = max(1.3, min(4.0, 0.5 + 0.026 * len(rows)))
    figure = Figure(figsize=(10, 0.7 + height * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (arm, run) in zip(panels, runs.items(), strict=True):
        for record in run.records:
            times = request_times(record, run.end_marker)
            if times is not None:
                _draw_request(axes, rows[record.request.id], times, record.token_s)
        finish_axes(figure, axes, f"{arm}: {_pauses_in_words(_times(run))}")
        axes.grid(axis="y", visible=False)
        axes.set_yticks([])
        axes.set_ylabel("requests")
    panels[-1].set_xlabel("seconds since the first request came")
    panels[0].set_xlim(left=0)
    panels[0].set_ylim(len(rows), -1)
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in _COLOURS.items()],
        loc="outside upper left",
        ncols=len(_COLOURS),
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
    label_log_axis(axes.yaxis, plain_number)
    axes.set_xlabel("time since the start of the trace (s)")
    axes.set_ylabel("gap between two answer tokens (ms)")
    figure.legend(handles=handles, loc="outside upper left", frameon=False, ncols=3)
    finish_axes(figure, axes, "Answer gaps: what a reader waits in the middle of an answer")
    return to_png(figure, caption)


def distributions(runs: Runs, caption: str) -> bytes:
    """How soon answers begin, and the tail of the answer gaps."""
    ttfat_s, tails = {}, {}
    for arm, run in runs.items():
        times = _times(run)
        ttfat_s[arm] = np.array([t.ttfat_s for t in times if t.ttfat_s is not None])
        gaps_ms = np.sort([gap * 1000 for t in times for gap in t.answer_gaps_s])
        # From every gap longer than the one before down to the single longest.
        tails[arm] = gaps_ms, np.arange(gaps_ms.size, 0, -1) / max(1, gaps_ms.size)
    return plots.distributions(ttfat_s, tails, caption)


def _rows(runs: Iterable[SeedRun]) -> dict[str, int]:
    """Row of each request, by id: as the first arm got them, which decides when turns follow."""
    rows: dict[str, int] = {}
    for run in runs:
        for record in sorted(run.records, key=lambda record: record.submit_s):
            rows.setdefault(record.request.id, len(rows))
    return rows


def _draw_request(axes: Axes, row: int, times: RequestTimes, token_s: Sequence[float]) -> None:
    first = times.submit_s + times.ttft_s
    last = times.submit_s + times.e2e_s
    answer = last if times.ttfat_s is None else times.submit_s + times.ttfat_s
    halts = [(a, b - a) for a, b in pairwise(token_s) if b - a > PAUSE_S and b <= answer]
    spans = {
        _WAITS: ([(times.submit_s, times.ttft_s)], 0.5),
        _THINKS: ([(first, answer - first)], 0.5),
        _ANSWERS: ([(answer, last - answer)], 1.0),
        # Taller than the rest: it is what is looked for.
        _STANDS: (list(_pauses(times)), 1.6),
    }
    for name, (ranges, height) in spans.items():
        axes.broken_barh(
            ranges, (row - height / 2, height), facecolors=_COLOURS[name], lw=0, zorder=2
        )
    axes.broken_barh(halts, (row - 0.25, 0.5), facecolors=_COLOURS[_WAITS], lw=0, zorder=2)


def _pauses(times: RequestTimes) -> Iterator[tuple[float, float]]:
    """Start and length of each gap within the answer that a reader notices."""
    for gap, end in zip(times.answer_gaps_s, times.answer_gap_ends_s, strict=True):
        if gap > PAUSE_S:
            yield end - gap, gap


def _pauses_in_words(times: Sequence[RequestTimes]) -> str:
    of_answers = [[gap for _, gap in _pauses(one)] for one in times]
    gaps = [gap for of_answer in of_answers for gap in of_answer]
    if not gaps:
        return "no answer stood still"
    number = sum(map(bool, of_answers))
    return (
        f"{number} answer{'s' * (number > 1)} stood still, for {sum(gaps):,.1f} s in all, "
        f"up to {max(gaps):,.1f} s at a time"
    )


def _times(run: SeedRun) -> list[RequestTimes]:
    times = (request_times(record, run.end_marker) for record in run.records)
    return [t for t in times if t is not None]
