"""Plots of a comparison, as PNG."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from meridian_patch.bench import plots
from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.figure_table import GOODPUT
from meridian_patch.bench.plots import (
    arm_colours,
    finish_axes,
    label_log_axis,
    plain_number,
    to_png,
)
from meridian_patch.bench.simulated.metrics import GAP_BORDERS_S
from meridian_patch.bench.simulated.run import ReplayRun, Timeline
from meridian_patch.bench.simulated.summary import SweepRow

_KV_LINE: dict[str, Any] = {
    "color": "#222222",
    "lw": 0.7,
    "alpha": 0.7,
    "label": "KV pool in use (right axis)",
}
_PHASE_COLOURS = {"prefill": "#BBBBBB", "think": "#56B4E9", "answer": "#009E73"}

# The runs of one point by arm and seed.
ArmRuns = Mapping[str, Mapping[int, ReplayRun]]


def distributions(runs: ArmRuns, title: str, caption: str) -> bytes:
    """Distributions of TTFAT and of the answer gaps; all seeds together."""
    ttfat_s, tails = {}, {}
    for arm, of_arm in runs.items():
        ttfat_s[arm] = np.concatenate([run.requests.ttfat_s for run in of_arm.values()])
        counts = np.sum([run.gap_counts for run in of_arm.values()], axis=0)
        at_least = counts[::-1].cumsum()[::-1] / max(1, counts.sum())
        shown = at_least > 0
        # Each bin stands at its lower border: its gaps are at least that long.
        tails[arm] = GAP_BORDERS_S[:-1][shown] * 1000, at_least[shown]
    return plots.distributions(ttfat_s, tails, caption, title=title, is_log=True)


def harm_scatter(runs: ArmRuns, title: str, caption: str) -> bytes | None:
    """TTFAT of each request over stock's of the same request; None if only one arm was run."""
    others = [arm for arm in runs if arm != STOCK]
    if STOCK not in runs or not others:
        return None
    figure = Canvas(figsize=(1 + 4.2 * len(others), 4.6), layout="constrained")
    panels = figure.subplots(1, len(others), sharex=True, sharey=True, squeeze=False)[0]
    colours = arm_colours(runs)
    for axes, arm in zip(panels, others, strict=True):
        pairs = [(run, runs[arm][seed]) for seed, run in runs[STOCK].items() if seed in runs[arm]]
        if not pairs:
            continue
        stock = np.concatenate([run.requests.ttfat_s for run, _ in pairs])
        ours = np.concatenate([run.requests.ttfat_s for _, run in pairs])
        axes.scatter(stock, ours, s=6, alpha=0.4, color=colours[arm], lw=0)
        ends = [min(stock.min(), ours.min()), max(stock.max(), ours.max())]
        axes.plot(ends, ends, color="#444444", lw=0.9, ls="--")
        axes.set_xscale("log")
        axes.set_yscale("log")
        label_log_axis(axes.xaxis, plain_number)
        label_log_axis(axes.yaxis, plain_number)
        axes.set_xlabel("first answer token with stock (s)")
        place = {"transform": axes.transAxes, "color": "#555555", "size": 9}
        axes.text(0.03, 0.97, "above the line: later than with stock", va="top", **place)
        axes.text(0.97, 0.03, "below: sooner", ha="right", **place)
        later, sooner = np.mean(ours > 1.05 * stock), np.mean(ours < stock / 1.05)
        words = f"{sooner:.0%} sooner, {later:.0%} later (by > 5%)"
        finish_axes(figure, axes, f"{arm}: {words}")
    panels[0].set_ylabel("first answer token of the same request (s)")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return to_png(figure, caption)


def timelines(shown: Mapping[str, Timeline], title: str, caption: str) -> bytes:
    """One run of each arm over time: running requests by phase, the queue, the KV pool."""
    figure = Canvas(figsize=(11, 1 + 2.3 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (arm, timeline) in zip(panels, shown.items(), strict=True):
        axes.stackplot(
            timeline.at_s,
            *timeline.running.values(),
            labels=[f"running, {phase}" for phase in timeline.running],
            colors=[_PHASE_COLOURS[phase] for phase in timeline.running],
            lw=0,
        )
        axes.plot(timeline.at_s, timeline.waiting, color="#D55E00", lw=1.1, label="waiting")
        usage = axes.twinx()
        usage.plot(timeline.at_s, 100 * timeline.kv_usage, **_KV_LINE)
        usage.set_ylim(0, 105)
        usage.set_ylabel("KV pool (%)", fontsize=8)
        usage.spines[["top"]].set_visible(False)
        axes.set_ylabel("requests")
        axes.set_ylim(bottom=0)
        finish_axes(figure, axes, f"{arm}, {title}")
        axes.spines["right"].set_visible(True)
        axes.set_xlim(left=0)
    handles = [*panels[0].get_legend_handles_labels()[0], Line2D([], [], **_KV_LINE)]
    figure.legend(handles=handles, loc="outside upper right", frameon=False, ncols=5)
    panels[-1].set_xlabel("virtual time (s)")
    return to_png(figure, caption)


def goodput_load(rows: Sequence[SweepRow], limits: str, caption: str) -> bytes:
    """Goodput against the offered rate; one panel per workload and pool, one line per arm."""
    groups: dict[tuple[str, int], list[SweepRow]] = {}
    for row in rows:
        groups.setdefault((row.point.workload, row.point.pool_tokens), []).append(row)
    width = min(3, len(groups))
    height = -(-len(groups) // width)
    figure = Canvas(figsize=(1.5 + 4.4 * width, 0.8 + 3.4 * height), layout="constrained")
    panels = list(figure.subplots(height, width, squeeze=False).flat)
    colours = arm_colours(dict.fromkeys(row.arm for row in rows))
    for axes, ((workload, pool), group) in zip(panels, groups.items(), strict=False):
        _draw_goodput(axes, group, colours)
        finish_axes(figure, axes, f"{workload}, {pool:,} tokens")
        axes.set_xlabel("offered requests/s")
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    panels[0].set_ylabel("requests/s within the limits")
    words = textwrap.fill(f"Within the limits: {limits}", int(11 * figure.get_figwidth()))
    figure.suptitle(words, fontsize=10, x=0.01, ha="left")
    return to_png(figure, caption)


def _draw_goodput(axes: Axes, rows: Sequence[SweepRow], colours: Mapping[str, str]) -> None:
    for number, arm in enumerate(dict.fromkeys(row.arm for row in rows)):
        points = [
            (row.point.rate_per_s, row.figures[GOODPUT])
            for row in rows
            if row.arm == arm and row.point.rate_per_s is not None
        ]
        points.sort(key=lambda point: point[0])
        rates = [rate for rate, _ in points]
        axes.plot(
            rates,
            [figure.value or 0.0 for _, figure in points],
            marker="o",
            ms=max(4, 9 - 2.5 * number),
            # As in the distributions: equal ones do not hide each other.
            lw=max(1.2, 4.0 - number),
            color=colours[arm],
            label=arm,
        )
        for rate, figure in points:
            if figure.interval is not None:
                axes.vlines(rate, *figure.interval, colors=colours[arm], alpha=0.4)
    ends = [0, max((row.point.rate_per_s or 0 for row in rows), default=0)]
    axes.plot(ends, ends, color="#444444", lw=0.7, ls="--", label="all that are offered")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
