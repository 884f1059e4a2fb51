"""The picture of the page: p99 slowdown against the share served well, one point per arm."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from arms.campaign import OURS, Point, label
from arms.registry import ARMS
from arms.summary import Summary
from meridian_patch.bench.arms import STOCK

_INK, _BLIND, _AWARE, _ORACLE, _OURS = "#222222", "#b07c3f", "#4a7fb5", "#888888", "#c2283a"
# Height of a name, over that of the panel.
_LINE = 0.042
_TICKS = (2, 3, 5, 10, 20, 50, 100, 200)
_KINDS = {
    "knows no phases": (_BLIND, "o"),
    "answers first + cut": (_AWARE, "s"),
    "oracle": (_ORACLE, "D"),
    "ours": (_OURS, "*"),
}


def draw(path: Path, summary: Summary, points: Sequence[Point]) -> None:
    """One panel per point."""
    columns = min(2, len(points))
    rows = -(-len(points) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(7.2 * columns, 5.0 * rows), squeeze=False, layout="constrained"
    )
    for axis, point in zip(axes.flat, points, strict=False):
        _panel(axis, summary, point)
    for axis in list(axes.flat)[len(points) :]:
        axis.set_visible(False)
    marks = [
        plt.Line2D([], [], color=color, marker=marker, linestyle="", label=name)
        for name, (color, marker) in _KINDS.items()
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(axis: Axes, summary: Summary, point: Point) -> None:
    shown = []
    for arm in summary.arms:
        share = float(summary.of(point, arm, "ok_share").mean())
        slowdown = float(summary.of(point, arm, "slowdown_p99").mean())
        color, marker = _KINDS[_kind(arm)]
        axis.plot(share, slowdown, marker, color=color, markersize=12 if arm == OURS else 7)
        shown.append((share, slowdown, arm))
    axis.set_yscale("log")
    axis.set_xlim(-0.02, 1.02)
    axis.set_yticks(_TICKS, labels=[str(tick) for tick in _TICKS])
    axis.minorticks_off()
    slowest = max(slowdown for _, slowdown, _ in shown)
    axis.set_ylim(min(slowdown for _, slowdown, _ in shown) / 1.4, slowest * 1.3)
    _write_names(axis, shown)
    axis.set_title(f"{point.workload}, ρ {point.rho:g}, pool {point.pool:,} tokens", loc="left")
    axis.set_xlabel("share of requests served well")
    axis.set_ylabel("slowdown of the first answer token, p99")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def _write_names(axis: Axes, shown: list[tuple[float, float, str]]) -> None:
    """Names right of the panel, from top to bottom, with a line to each point."""
    low, high = (math.log(bound) for bound in axis.get_ylim())
    ordered = sorted(shown, key=lambda each: (-each[1], each[0]))
    places = [(math.log(each[1]) - low) / (high - low) for each in ordered]
    for index in range(1, len(places)):
        places[index] = min(places[index], places[index - 1] - _LINE)
    # What fell out of the panel is pushed up again.
    places[-1] = max(places[-1], _LINE / 2)
    for index in range(len(places) - 2, -1, -1):
        places[index] = max(places[index], places[index + 1] + _LINE)
    for (share, slowdown, arm), place in zip(ordered, places, strict=True):
        axis.annotate(
            label(arm).replace("`", ""),
            (share, slowdown),
            xytext=(1.04, place),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=_OURS if arm == OURS else _INK,
            arrowprops={
                "arrowstyle": "-",
                "color": "#bbbbbb",
                "lw": 0.6,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def _kind(arm: str) -> str:
    if arm == OURS:
        return "ours"
    if arm == STOCK:
        return "knows no phases"
    entry = ARMS[arm]
    if entry.is_oracle:
        return "oracle"
    return "answers first + cut" if entry.mixin.answers_first else "knows no phases"
