"""Figures of a comparison: summed up over seeds, and shown as tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.figure_table import GOODPUT, HARM
from meridian_patch.bench.simulated.grid import Runs, SweepPoint
from meridian_patch.bench.simulated.metrics import goodput, harm_p99
from meridian_patch.bench.simulated.rows import ROWS, Row
from meridian_patch.bench.simulated.run import ReplayRun
from meridian_patch.bench.statistics import Interval, ratio_of_sums

_RATIO_DIGITS = 3
# Of each seed, the figures by name.
BySeed = Mapping[int, Mapping[str, float | None]]


NOTE = "Mean over seeds; x: over stock. In brackets: 95 % bootstrap over seeds, paired by seed."


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as goodput.

    Attributes:
        slowdown: TTFAT over that of the same request alone on the engine.
        itl_s: p99 of the request's own answer gaps.
    """

    slowdown: float = 10.0
    itl_s: float = 0.1


@dataclass(frozen=True)
class Figure:
    """A figure over all seeds, with 95 % bootstrap intervals if there are several.

    Attributes:
        value: mean over seeds.
        over_stock: its mean over stock's mean; None if stock's is 0, and for harm, which is
            relative to stock itself.
    """

    value: float | None
    interval: Interval | None = None
    over_stock: float | None = None
    over_stock_interval: Interval | None = None


@dataclass(frozen=True)
class SweepRow:
    """One arm at one point.

    Attributes:
        seeds: of the replays that succeeded. Ratios are over those that stock has too.
        by_seed: the figures of each seed by name.
    """

    point: SweepPoint
    arm: str
    seeds: tuple[int, ...]
    figures: Mapping[str, Figure]
    by_seed: BySeed


def summarise(runs: Runs, limits: Limits) -> list[SweepRow]:
    """Rows in the order in which points and arms stand in ``runs``."""
    rows = []
    for point, arm in dict.fromkeys((key.point, key.arm) for key in runs):
        ours = {key.seed: run for key, run in runs.items() if key[:2] == (point, arm)}
        stock = {key.seed: run for key, run in runs.items() if key[:2] == (point, STOCK)}
        by_seed = {seed: _of_seed(run, stock.get(seed), limits) for seed, run in ours.items()}
        of_stock = {seed: _of_seed(run, None, limits) for seed, run in stock.items()}
        names = next(iter(by_seed.values()))
        figures = {name: _figure(name, by_seed, of_stock) for name in names}
        rows.append(SweepRow(point, arm, tuple(by_seed), figures, by_seed))
    return rows


def _of_seed(run: ReplayRun, stock: ReplayRun | None, limits: Limits) -> dict[str, float | None]:
    makespan_s = run.figures["makespan_s"] or np.inf
    return {
        **run.figures,
        GOODPUT: goodput(run.requests, makespan_s, limits.slowdown, limits.itl_s),
        HARM: harm_p99(run.requests, stock.requests) if stock else None,
    }


def _figure(name: str, ours: BySeed, stock: BySeed) -> Figure:
    value, interval = ratio_of_sums(_known(name, ours, ours))
    # Harm has no value for stock, so that nothing is shared.
    shared = [seed for seed in ours if _is_known(name, ours, seed) and _is_known(name, stock, seed)]
    ratio = ratio_of_sums(_known(name, ours, shared), _known(name, stock, shared))
    return Figure(value, interval, *ratio)


def _known(name: str, figures: BySeed, seeds: Iterable[int]) -> list[float]:
    values = (figures[seed].get(name) for seed in seeds if seed in figures)
    return [value for value in values if value is not None]


def _is_known(name: str, figures: BySeed, seed: int) -> bool:
    return seed in figures and figures[seed][name] is not None


@dataclass(frozen=True)
class Cells:
    """One line of a table as text."""

    label: str
    cells: Sequence[str]
    words: str = ""


def by_point(rows: Sequence[SweepRow]) -> dict[SweepPoint, list[SweepRow]]:
    """The rows of each point, in the order of the points' first rows."""
    points: dict[SweepPoint, list[SweepRow]] = {}
    for row in rows:
        points.setdefault(row.point, []).append(row)
    return points


def point_cells(rows: Sequence[SweepRow], *, is_brief: bool) -> list[Cells]:
    """The lines of one point's table, a cell per arm; figures that no arm has are left out."""
    lines = []
    if len({row.seeds for row in rows}) > 1:
        lines.append(Cells("seeds that ended", [str(len(row.seeds)) for row in rows]))
    for shown in ROWS:
        if is_brief and not shown.is_brief:
            continue
        cells = [_cell(shown, row, is_brief=is_brief) for row in rows]
        if any(cell != "-" for cell in cells):
            lines.append(Cells(shown.kind.title, cells, shown.kind.words))
    return lines


def point_table(rows: Sequence[SweepRow]) -> Table:
    """The brief table of one point, for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(row.arm, justify="right")
    for line in point_cells(rows, is_brief=True):
        table.add_row(line.label, *line.cells)
    return table


def _cell(shown: Row, row: SweepRow, *, is_brief: bool) -> str:
    kind = shown.kind
    figure = row.figures.get(kind.name, Figure(None))
    if figure.value is None:
        return "-"
    if row.arm == STOCK or not shown.is_ratio or figure.over_stock is None:
        return _text(figure.value, figure.interval, kind.scale, kind.digits)
    ratio = f"x {_text(figure.over_stock, figure.over_stock_interval, 1.0, _RATIO_DIGITS)}"
    value = _text(figure.value, None, kind.scale, kind.digits)
    return ratio if is_brief else f"{value} · {ratio}"


def _text(value: float, interval: Interval | None, scale: float, digits: int) -> str:
    text = f"{value * scale:,.{digits}f}"
    if interval is None or interval[0] == interval[1]:
        return text
    low, high = (f"{bound * scale:,.{digits}f}" for bound in interval)
    return f"{text} [{low}..{high}]"
