"""Table, JSON and plot of ``s-turns`` replays."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from rich import box
from rich.table import Table

from meridian_patch.bench.simulated.conversation_arms import ARM_WORDS, INFINITE
from meridian_patch.bench.simulated.conversation_figures import Figure, Row, Runs
from meridian_patch.bench.simulated.conversation_grid import Grid
from meridian_patch.bench.simulated.cost import CostModel

HOW = "simulated"
FORMAT_VERSION = 1
DEFINITIONS = {
    "hit_share": "prompt tokens found in the prefix cache at a request's first admission, over "
    "all prompt tokens",
    "infinite": "upper bound, not replayed: every full block that any earlier request of stock's "
    "replay had computed hits",
    "avoidable_miss_share": "(infinite - arm) / (infinite - stock), in hit tokens",
    "rho": "offered output tokens per second over the output tokens per second of stock with all "
    "conversations offered at once and pauses dropped, between 10 % and 80 % of all output",
    "interval": "95 % percentile bootstrap over seeds",
}
# Okabe and Ito's palette: told apart by colour-blind readers too.
_COLOURS = ("#D55E00", "#8A8A8A", "#56B4E9", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
_DPI = 130
# Figure: title, scale, digits. Short: a table must fit into 80 columns.
_COLUMNS = {
    "hit_share": ("hits %", 100.0, 1),
    "avoidable_miss_share": ("avoid", 1.0, 2),
    "tokens_per_s": ("tok/s", 1.0, 0),
    "ttfat_mean_s": ("TTFAT", 1.0, 1),
    "preemptions": ("preem.", 1.0, 0),
    "recomputed_tokens": ("again", 1e-3, 0),
}
# Intervals of the others stand in the JSON.
_WITH_INTERVAL = ("hit_share", "avoidable_miss_share")
TABLE_NOTE = (
    "avoid: avoidable misses left, (infinite - arm) / (infinite - stock); 95 %: bootstrap over "
    "seeds; TTFAT: mean, s; preem.: preemptions; again: thousands of tokens recomputed"
)


@dataclass(frozen=True)
class TurnsOrigin:
    """How the figures were obtained."""

    date: str
    command: str
    cost: CostModel
    grid: Grid


def write_turns_report(
    folder: Path, rows: Sequence[Row], runs: Runs, origin: TurnsOrigin
) -> list[Path]:
    """Write ``turns.json`` and ``turns.png``; their paths."""
    document, picture = folder / "turns.json", folder / "turns.png"
    document.write_text(json.dumps(turns_data(rows, runs, origin), indent=1) + "\n")
    hit_share_plot(rows, origin).savefig(picture, dpi=_DPI)
    return [document, picture]


def turns_data(rows: Sequence[Row], runs: Runs, origin: TurnsOrigin) -> dict[str, Any]:
    """The report as plain data; shares from 0 to 1, times in seconds of the virtual clock."""
    return {
        "version": FORMAT_VERSION,
        "how": HOW,
        "workload": "s-turns",
        "date": origin.date,
        "command": origin.command,
        "cost_model": origin.cost.model_dump(),
        "grid": asdict(origin.grid),
        "definitions": DEFINITIONS,
        "arms": ARM_WORDS,
        "rows": [
            {**row.place._asdict(), "arm": row.arm, "seeds": row.seeds}
            | {name: asdict(figure) for name, figure in row.figures.items()}
            for row in rows
        ],
        "runs": [
            {**key.place._asdict(), "arm": key.arm, "seed": key.seed} | asdict(run)
            for key, run in runs.items()
        ],
    }


def turns_tables(rows: Sequence[Row]) -> list[Table]:
    """One table per point of the grid, one line per arm."""
    return [_place_table(list(group)) for _, group in groupby(rows, key=lambda row: row.place)]


def _place_table(rows: Sequence[Row]) -> Table:
    place, rho = rows[0].place, rows[0].figures["rho"]
    title = (
        f"\n{place.history}, pool {place.pool_tokens:,} tokens, {place.rate_per_s:g}/s, "
        f"rho {_value(rho, 1.0, 2)}"
    )
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )
    table.add_column("arm", no_wrap=True)
    for name, (label, _, _) in _COLUMNS.items():
        table.add_column(label, justify="right", no_wrap=True)
        if name in _WITH_INTERVAL:
            table.add_column("95 %", no_wrap=True)
    for row in rows:
        cells = []
        for name, (_, scale, digits) in _COLUMNS.items():
            figure = row.figures.get(name, Figure(None))
            cells.append(_value(figure, scale, digits))
            if name in _WITH_INTERVAL:
                cells.append(_interval(figure, scale, digits))
        table.add_row(row.arm, *cells)
    return table


def hit_share_plot(rows: Sequence[Row], origin: TurnsOrigin) -> Canvas:
    """Hit share by arm against rho; one panel per history, one line per arm and pool."""
    histories = list(dict.fromkeys(row.place.history for row in rows))
    canvas = Canvas(figsize=(2.2 + 4.6 * len(histories), 4.6), layout="constrained")
    panels = canvas.subplots(1, len(histories), sharey=True, squeeze=False)[0]
    for axes, history in zip(panels, histories, strict=True):
        _draw_panel(axes, [row for row in rows if row.place.history == history])
        axes.set_title(f"history {history}", loc="left", fontsize=11, fontweight="bold")
    panels[0].set_ylabel("prefix-hit share of prompt tokens (%)")
    panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    caption = f"{HOW}, cost model {origin.cost.name} ({origin.cost.provenance}) · {origin.date}"
    canvas.supxlabel(f"offered load rho; 1 is what stock saturates at\n{caption}", fontsize=9)
    return canvas


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    arms = list(dict.fromkeys(row.arm for row in rows))
    pools = sorted({row.place.pool_tokens for row in rows})
    for order, (arm, colour) in enumerate(zip(arms, ("#222222", *_COLOURS), strict=False)):
        for pool, marker in zip(pools, "os^vD", strict=False):
            points = [row for row in rows if (row.arm, row.place.pool_tokens) == (arm, pool)]
            points.sort(key=_rho)
            axes.plot(
                list(map(_rho, points)),
                [100 * (row.figures["hit_share"].value or 0.0) for row in points],
                "--" if arm == INFINITE else "-",
                color=colour,
                marker=marker,
                # Later arms are smaller, so that equal ones do not hide each other.
                ms=max(4.0, 11.0 - 1.5 * order),
                label=f"{arm}, {pool:,} tokens",
            )
            for row in points:
                interval = row.figures["hit_share"].interval
                if interval is not None:
                    low, high = (100 * bound for bound in interval)
                    axes.vlines(_rho(row), low, high, colors=colour, alpha=0.4)
    axes.grid(visible=True, color="#E6E6E6", lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _rho(row: Row) -> float:
    return row.figures["rho"].value or 0.0


def _value(figure: Figure, scale: float, digits: int) -> str:
    return "-" if figure.value is None else f"{figure.value * scale:,.{digits}f}"


def _interval(figure: Figure, scale: float, digits: int) -> str:
    if figure.interval is None:
        return ""
    low, high = (f"{bound * scale:.{digits}f}" for bound in figure.interval)
    return f"{low}..{high}" if low != high else ""
