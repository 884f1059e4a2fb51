"""Figures of a comparison: summed up over seeds, and shown as tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.simulated.grid import Runs, SweepPoint
from meridian_patch.bench.simulated.metrics import goodput, harm_p99
from meridian_patch.bench.simulated.run import ReplayRun
from meridian_patch.bench.statistics import bootstrap_quotient

HARM = "harm_p99"
GOODPUT = "goodput_per_s"
Interval = tuple[float, float]
# Of each seed, the figures by name.
BySeed = Mapping[int, Mapping[str, float | None]]


class Unit(NamedTuple):
    """How a figure is written: times ``scale``, with so many digits after the point."""

    scale: float = 1.0
    digits: int = 2


SECONDS = Unit()
MS = Unit(1000.0, 1)
PERCENT = Unit(100.0, 1)
MEAN_COUNT = Unit(1.0, 1)
COUNT = Unit(1.0, 0)


@dataclass(frozen=True)
class Kind:
    """How a figure is shown.

    Attributes:
        is_ratio: arms are shown over stock; otherwise in the figure's unit, as stock is.
        is_brief: the table on the terminal has it too.
    """

    name: str
    label: str
    unit: Unit = SECONDS
    is_ratio: bool = True
    is_brief: bool = False


KINDS = (
    Kind("ttft_mean_s", "TTFT mean, s"),
    Kind("ttft_p99_s", "TTFT p99, s"),
    Kind("ttfat_mean_s", "TTFAT mean, s", is_brief=True),
    Kind("ttfat_p50_s", "TTFAT p50, s"),
    Kind("ttfat_p95_s", "TTFAT p95, s"),
    Kind("ttfat_p99_s", "TTFAT p99, s", is_brief=True),
    Kind("slowdown_mean", "TTFAT slowdown mean"),
    Kind("slowdown_p99", "TTFAT slowdown p99", is_brief=True),
    Kind(HARM, "harm p99, %", PERCENT, is_ratio=False, is_brief=True),
    Kind("ttot_p99_s", "TTOT p99, ms", MS),
    Kind("ttot_max_s", "TTOT max, ms", MS),
    Kind("think_tpot_mean_s", "think TPOT mean, ms", MS),
    Kind("think_tpot_p99_s", "think TPOT p99, ms", MS),
    Kind("answer_itl_p50_s", "answer ITL p50, ms", MS),
    Kind("answer_itl_p99_s", "answer ITL p99, ms", MS, is_brief=True),
    Kind("answer_itl_p999_s", "answer ITL p99.9, ms", MS),
    Kind("answer_gap_max_s", "answer gap max, ms", MS, is_brief=True),
    Kind(
        "answer_itl_p99_over_decode_only",
        "answer ITL p99 / decode step",
        is_ratio=False,
        is_brief=True,
    ),
    Kind("answer_gap_max_over_decode_only", "answer gap max / decode step", is_ratio=False),
    Kind("decode_only_step_p99_s", "decode-only step p99, ms", MS),
    Kind("answer_stalls", "answer stalls", MEAN_COUNT, is_ratio=False, is_brief=True),
    Kind("qoe_mean", "QoE mean", Unit(1.0, 4), is_ratio=False),
    Kind("qoe_low_share", "QoE < 0.95, % of requests", PERCENT, is_ratio=False, is_brief=True),
    Kind("e2e_mean_s", "e2e mean, s"),
    Kind("e2e_p99_s", "e2e p99, s"),
    Kind("tokens_per_s", "tokens/s", MEAN_COUNT, is_brief=True),
    Kind("steady_tokens_per_s", "steady tokens/s", MEAN_COUNT),
    Kind("window_tokens_per_s", "tokens/s while requests arrive", MEAN_COUNT),
    Kind(GOODPUT, "goodput, requests/s", Unit(1.0, 3), is_brief=True),
    Kind("hit_share", "prefix hits, %", PERCENT, is_ratio=False, is_brief=True),
    Kind(
        "hit_bound_share", "... if nothing were evicted, %", PERCENT, is_ratio=False, is_brief=True
    ),
    Kind("missed_tokens", "avoidable prefix misses", COUNT, is_brief=True),
    Kind("preemptions", "preemptions", MEAN_COUNT, is_brief=True),
    Kind("preemptions_prefill", "... in prefill", MEAN_COUNT, is_ratio=False),
    Kind("preemptions_think", "... thinking", MEAN_COUNT, is_ratio=False),
    Kind("preemptions_answer", "... answering", MEAN_COUNT, is_ratio=False),
    Kind("preempted_answers", "preempted answers", MEAN_COUNT, is_ratio=False, is_brief=True),
    Kind("preemptions_max", "preemptions of one request, most", MEAN_COUNT, is_ratio=False),
    Kind("recomputed_tokens", "recomputed tokens", COUNT, is_brief=True),
    Kind("recomputed_tokens_think", "... thinking", COUNT, is_ratio=False),
    Kind("recomputed_tokens_answer", "... answering", COUNT, is_ratio=False),
    Kind("first_wait_max_s", "longest first wait, s", is_brief=True),
    Kind("longest_pause_s", "longest pause, s", is_brief=True),
)
# What a label does not say.
DEFINITIONS: Mapping[str, str] = {
    "ttft_mean_s": "submit to first token of any kind",
    "ttfat_mean_s": "submit to first answer token",
    "slowdown_mean": "TTFAT over that of the same request alone on the engine with nothing cached",
    HARM: "p99 over requests of (arm - stock) / stock, TTFAT of the same request",
    "ttot_p99_s": "boundary to first answer token",
    "think_tpot_mean_s": "per think token but the first",
    "answer_itl_p50_s": "gaps between answer tokens",
    "answer_itl_p99_over_decode_only": "over the p99 time of the run's steps without prefill",
    "answer_stalls": "answer gaps over 250 ms",
    "qoe_mean": "Andes' integral at 50 ms/token",
    "tokens_per_s": "output tokens from the first arrival to the last token",
    "steady_tokens_per_s": "from 10 % to 80 % of all output tokens",
    "window_tokens_per_s": "output tokens from the first arrival to the last",
    GOODPUT: "requests within the limits on TTFAT slowdown and own answer ITL p99",
    "hit_share": "prompt tokens found in the prefix cache when a request is first admitted",
    "hit_bound_share": "prompt tokens in full blocks that an earlier request of the run computed",
    "missed_tokens": "prompt tokens that would be hit if nothing were evicted, and are not",
    "first_wait_max_s": "from a request's arrival to the first step that it is part of",
    "longest_pause_s": "longest time after its first step in which a request was part of no step",
}
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
    values = _known(name, ours, ours)
    mean, interval = _quotient(values, np.ones_like(values))
    # Harm has no value for stock, so that nothing is shared.
    shared = [seed for seed in ours if _is_known(name, ours, seed) and _is_known(name, stock, seed)]
    ratio = _quotient(_known(name, ours, shared), _known(name, stock, shared))
    return Figure(mean, interval, *ratio)


def _quotient(
    above: NDArray[np.float64], below: NDArray[np.float64]
) -> tuple[float | None, Interval | None]:
    total = below.sum()
    return (float(above.sum() / total), bootstrap_quotient(above, below)) if total else (None, None)


def _known(name: str, figures: BySeed, seeds: Iterable[int]) -> NDArray[np.float64]:
    return np.array([figures[seed][name] for seed in seeds if _is_known(name, figures, seed)])


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
    for kind in KINDS:
        if is_brief and not kind.is_brief:
            continue
        cells = [_cell(kind, row, is_brief=is_brief) for row in rows]
        if any(cell != "-" for cell in cells):
            lines.append(Cells(kind.label, cells, DEFINITIONS.get(kind.name, "")))
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


def _cell(kind: Kind, row: SweepRow, *, is_brief: bool) -> str:
    figure = row.figures.get(kind.name, Figure(None))
    if figure.value is None:
        return "-"
    if row.arm == STOCK or not kind.is_ratio or figure.over_stock is None:
        return _text(figure.value, figure.interval, kind.unit)
    ratio = f"x {_text(figure.over_stock, figure.over_stock_interval, Unit(1.0, 3))}"
    return ratio if is_brief else f"{_text(figure.value, None, kind.unit)} · {ratio}"


def _text(value: float, interval: Interval | None, unit: Unit) -> str:
    text = f"{value * unit.scale:,.{unit.digits}f}"
    if interval is None or interval[0] == interval[1]:
        return text
    low, high = (f"{bound * unit.scale:,.{unit.digits}f}" for bound in interval)
    return f"{text} [{low}..{high}]"
