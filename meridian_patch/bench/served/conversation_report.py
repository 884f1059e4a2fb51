"""Tables, JSON and plot of served conversations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas
from rich import box
from rich.table import Table

from meridian_patch.bench.machine import Machine
from meridian_patch.bench.served.conversation_arms import AMPLE, ARM_WORDS, STOCK, ServedRun, Stage
from meridian_patch.bench.served.conversation_figures import SERVED_FIGURES, avoidable_miss_share
from meridian_patch.bench.served.conversation_script import ServedLoad
from meridian_patch.bench.served.metrics import Figures
from meridian_patch.bench.served.summary import Spread
from meridian_patch.bench.statistics import bootstrap_interval

FORMAT_VERSION = 1
RATIOS = ("hit_share", "ttft_p50_s", "ttfat_p50_s", "ttfat_p95_s", "tokens_per_s", "preemptions")
DEFINITIONS = {
    "hit_share": "vllm:prefix_cache_hits over vllm:prefix_cache_queries: prompt tokens found in "
    "the cache at first admission, over prompt tokens",
    "avoidable_miss_share": "(ample - arm) / (ample - stock), in hit shares of the same seed",
    "ttfat": "from sending the request to its first answer token",
    "ratio": "by seed; interval: 95 % percentile bootstrap over seeds, of the mean ratio",
}
_SCALES = {"ms": 1000.0, "%": 100.0}
_COLOURS = ("#8A8A8A", "#222222", "#56B4E9", "#D55E00", "#009E73")
_DPI = 130


@dataclass(frozen=True)
class ServedOrigin:
    """How the figures were obtained."""

    date: str
    command: str
    machine: Machine
    stage: Stage
    load: ServedLoad

    @property
    def how(self) -> str:
        return f"measured-cpu, {self.machine.cores} CPU cores"


class Ratio(NamedTuple):
    """One figure of an arm over another's: by seed, and the interval of their mean."""

    figure: str
    arm: str
    under: str
    seeds: Mapping[int, float]
    interval: tuple[float, float] | None


FiguresByArm = Mapping[str, Mapping[int, Figures]]


def by_arm(runs: Sequence[ServedRun]) -> dict[str, dict[int, Figures]]:
    """Figures of complete runs by arm and seed, ``avoidable_miss_share`` among them."""
    arms: dict[str, dict[int, Figures]] = {}
    for run in runs:
        if run.error is None:
            arms.setdefault(run.arm, {})[run.seed] = run.figures()
    for seeds in arms.values():
        for seed, figures in seeds.items():
            bounds = [arms.get(arm, {}).get(seed, {}).get("hit_share") for arm in (STOCK, AMPLE)]
            ours = figures["hit_share"]
            if ours is not None and bounds[0] is not None and bounds[1] is not None:
                share = avoidable_miss_share(ours, bounds[0], bounds[1])
                figures["avoidable_miss_share"] = share
    return arms


def ratios(arms: FiguresByArm) -> list[Ratio]:
    """Each arm over stock, and each patched arm over the one before it."""
    names = [name for name in arms if name not in {STOCK, AMPLE}]
    pairs = [(name, STOCK) for name in names if STOCK in arms]
    pairs += [(after, before) for before, after in pairwise(names)]
    return [_ratio(arms, figure, *pair) for pair in pairs for figure in RATIOS]


def summaries(arms: FiguresByArm) -> dict[str, dict[str, dict[str, Any]]]:
    """By arm and figure: median, lowest, highest, and the bootstrap interval of the mean."""
    return {
        arm: {
            name: {**asdict(spread), "mean_interval": bootstrap_interval(values, fmean)}
            for name, _, _ in _rows()
            if (spread := Spread.of(values := _values(seeds, name))) is not None
        }
        for arm, seeds in arms.items()
    }


def write_served_report(
    folder: Path, runs: Sequence[ServedRun], origin: ServedOrigin
) -> list[Path]:
    """Write ``served-turns.json`` and ``served-turns.png``; their paths."""
    document, picture = folder / "served-turns.json", folder / "served-turns.png"
    document.write_text(json.dumps(served_data(runs, origin), indent=1) + "\n")
    served_plot(by_arm(runs), origin).savefig(picture, dpi=_DPI)
    return [document, picture]


def served_data(runs: Sequence[ServedRun], origin: ServedOrigin) -> dict[str, Any]:
    """The report as plain data; shares from 0 to 1, times in seconds."""
    arms = by_arm(runs)
    return {
        "version": FORMAT_VERSION,
        "how": origin.how,
        "workload": "s-turns, served",
        "date": origin.date,
        "command": origin.command,
        "machine": asdict(origin.machine),
        "stage": asdict(origin.stage) | {"model": origin.stage.model.name},
        "load": asdict(origin.load),
        "definitions": DEFINITIONS,
        "arms": {arm: ARM_WORDS[arm] for arm in arms},
        "summaries": summaries(arms),
        "ratios": [ratio._asdict() for ratio in ratios(arms)],
        "runs": [
            {
                "arm": run.arm,
                "seed": run.seed,
                "error": run.error,
                "figures": arms.get(run.arm, {}).get(run.seed) or run.figures(),
            }
            for run in runs
        ],
    }


def served_tables(runs: Sequence[ServedRun], title: str) -> list[Table]:
    """Return a table of figures by arm and, where arms can be compared, one of their ratios.

    A cell is the median over seeds, then (lowest..highest). Each arm is compared with stock, and
    each patched arm with the one before it. Failed runs are left out.
    """
    arms = by_arm(runs)
    table = _table(title, "", *arms)
    for name, label, scale in _rows():
        cells = (_spread(_values(arms[arm], name), scale) for arm in arms)
        table.add_row(label, *cells)
    shown = ratios(arms)
    pairs = list(dict.fromkeys((ratio.arm, ratio.under) for ratio in shown))
    beside = _table("by seed", "", *(f"{arm} / {under}" for arm, under in pairs))
    for figure in RATIOS if pairs else ():
        of_figure = {(r.arm, r.under): r for r in shown if r.figure == figure}
        cells = (_spread([*of_figure[pair].seeds.values()], 1.0) for pair in pairs)
        beside.add_row(_label(figure), *cells)
    return [table, beside] if pairs else [table]


def served_plot(arms: FiguresByArm, origin: ServedOrigin) -> Canvas:
    """Hit share and TTFAT p50 by arm, one dot per seed, a line at the median."""
    canvas = Canvas(figsize=(9.5, 4.2), layout="constrained")
    panels = canvas.subplots(1, 2)
    shown = (
        ("hit_share", 100.0, "prefix-hit share of prompt tokens (%)"),
        ("ttfat_p50_s", 1000.0, "TTFAT p50 (ms)"),
    )
    for axes, (name, scale, label) in zip(panels, shown, strict=True):
        for place, (arm, colour) in enumerate(zip(arms, _COLOURS, strict=False)):
            dots = [scale * value for value in _values(arms[arm], name)]
            axes.scatter([place] * len(dots), dots, color=colour, zorder=3)
            spread = Spread.of(dots)
            if spread is not None:
                axes.hlines(spread.median, place - 0.3, place + 0.3, color=colour, lw=2)
        axes.set_xticks(range(len(arms)), arms)
        highest = max(
            (scale * v for seeds in arms.values() for v in _values(seeds, name)), default=1
        )
        axes.set_ylim(0, 1.1 * highest)
        axes.set_ylabel(label)
        axes.grid(visible=True, axis="y", color="#E6E6E6", lw=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    words = f"history {origin.stage.history}, {origin.stage.kv_blocks} KV blocks"
    canvas.supxlabel(f"{words} · {origin.how} · {origin.date}", fontsize=9)
    return canvas


def _ratio(arms: FiguresByArm, figure: str, arm: str, under: str) -> Ratio:
    seeds = {}
    for seed, figures in arms[arm].items():
        above, below = figures.get(figure), arms[under].get(seed, {}).get(figure)
        if above is not None and below:
            seeds[seed] = above / below
    interval = bootstrap_interval([*seeds.values()], fmean)
    return Ratio(figure, arm, under, seeds, interval)


def _rows() -> list[tuple[str, str, float]]:
    """Key, label and scale of each row."""
    rows = [
        (kind.name, f"{kind.label}, {kind.unit}" if kind.unit else kind.label, kind.unit)
        for kind in SERVED_FIGURES
    ]
    rows.insert(1, ("avoidable_miss_share", "avoidable misses, stock = 1", ""))
    return [(name, label, _SCALES.get(unit, 1.0)) for name, label, unit in rows]


def _label(figure: str) -> str:
    return next(kind.label for kind in SERVED_FIGURES if kind.name == figure)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _values(seeds: Mapping[int, Figures], name: str) -> list[float]:
    """One figure over the seeds that have it."""
    values = (figures.get(name) for figures in seeds.values())
    return [value for value in values if value is not None]


def _spread(values: Sequence[float], scale: float) -> str:
    spread = Spread.of([value * scale for value in values])
    if spread is None:
        return "-"
    middle, low, high = map(_number, (spread.median, spread.low, spread.high))
    return f"{middle} ({low}..{high})" if spread.count > 1 else middle


def _number(value: float) -> str:
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0  # noqa: PLR2004 - digits
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
