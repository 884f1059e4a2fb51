"""Writes what a comparison found: ``report.html`` with plots, ``results.json``, and the PNGs."""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from meridian_patch.bench.report import data_url, write_json, write_page
from meridian_patch.bench.simulated import plots
from meridian_patch.bench.simulated.grid import (
    UNITS,
    Plan,
    RunKey,
    Saturation,
    SweepPoint,
    point_title,
)
from meridian_patch.bench.simulated.rows import DEFINITIONS
from meridian_patch.bench.simulated.run import ReplayRun
from meridian_patch.bench.simulated.summary import (
    NOTE,
    Cells,
    Figure,
    Limits,
    SweepRow,
    by_point,
    point_cells,
)
from meridian_patch.bench.statistics import plain_interval
from meridian_patch.replay.cost import CostModel

HOW = "simulated"
FORMAT_VERSION = 1


@dataclass
class Results:
    """What was asked for, and what was obtained so far.

    Attributes:
        is_sweep: loads and pools were varied.
        command: as typed.
        date: ISO 8601, with the time zone.
        saturations: what rho and KV cap were measured against; empty if neither was asked for.
        runs: replays that succeeded.
        failures: by the failed replay in words, what went wrong.
        is_interrupted: Ctrl-C ended it early.
    """

    plan: Plan
    cost: CostModel
    limits: Limits
    is_sweep: bool
    command: str = field(default_factory=lambda: shlex.join(["meridian", *sys.argv[1:]]))
    date: str = field(
        default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds")
    )
    saturations: list[Saturation] = field(default_factory=list)
    runs: dict[RunKey, ReplayRun] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False

    @property
    def is_partial(self) -> bool:
        """Whether replays are missing."""
        return self.is_interrupted or bool(self.failures)

    @property
    def provenance(self) -> str:
        """How the figures were obtained."""
        return f"{HOW}, cost model {self.cost.name} ({self.cost.provenance})"

    @property
    def caption(self) -> str:
        """One line for below a plot."""
        return f"{self.provenance} · {self.date} · {self.command}"


@dataclass(frozen=True)
class _Plot:
    title: str
    file: str
    png: bytes

    text: str = ""

    @property
    def data(self) -> str:
        return data_url(self.png)


@dataclass(frozen=True)
class _Section:
    title: str
    arms: Sequence[str]
    seeds: int
    lines: Sequence[Cells]
    plots: Sequence[_Plot]


def write_results(folder: Path, results: Results, rows: Sequence[SweepRow]) -> list[Path]:
    """Write page, data and plots; the paths of page and data.

    Args:
        folder: exists.
        results: has at least one run.
        rows: of its runs.
    """
    data = folder / "results.json"
    write_json(data, results_data(results, rows))
    sections = [_section(results, of_point) for of_point in by_point(rows).values()]
    across = []
    if results.is_sweep:
        limits = results.limits
        text = f"the answer began at most {limits.slowdown:g} times as late as on an idle engine, "
        text += f"and 99% of its gaps are at most {limits.itl_s * 1000:g} ms"
        png = plots.goodput_load(rows, text, results.caption)
        across.append(_Plot("Goodput over load", "goodput.png", png))
    for plot in (*across, *(plot for section in sections for plot in section.plots)):
        (folder / plot.file).write_bytes(plot.png)
    page = folder / "report.html"
    write_page(
        page,
        "meridian_patch.bench.simulated",
        results=results,
        across=across,
        sections=sections,
        units=UNITS,
        note=NOTE,
    )
    return [page, data]


def results_data(results: Results, rows: Sequence[SweepRow]) -> dict[str, Any]:
    """The report as plain data; shares from 0 to 1, times in seconds of the virtual clock."""
    plan = results.plan
    return {
        "version": FORMAT_VERSION,
        "provenance": HOW,
        "date": results.date,
        "command": results.command,
        "is_partial": results.is_partial,
        "failures": results.failures,
        "cost_model": results.cost.model_dump(),
        "workloads": [
            {**asdict(offer), "trace": str(offer.trace) if offer.trace else None}
            for offer in plan.offers
        ],
        "arms": {
            arm.name: {"is_patched": arm.is_patched, "settings": dict(arm.settings)}
            for arm in plan.arms
        },
        "offload_gb_per_s": plan.offload_gb_per_s,
        "limits": asdict(results.limits),
        "units": UNITS,
        "saturations": [asdict(saturation) for saturation in results.saturations],
        "definitions": DEFINITIONS,
        "rows": [
            {
                **row.point._asdict(),
                "arm": row.arm,
                "seeds": row.seeds,
                "figures": {name: _plain(figure) for name, figure in row.figures.items()},
                "by_seed": {str(seed): figures for seed, figures in row.by_seed.items()},
            }
            for row in rows
        ],
        "runs": [
            {
                **key.point._asdict(),
                "arm": key.arm,
                "seed": key.seed,
                "wall_s": run.wall_s,
                "counters": dict(run.counters),
            }
            for key, run in results.runs.items()
        ],
    }


def _plain(figure: Figure) -> dict[str, Any]:
    ends = plain_interval(figure.over_stock_interval)
    return asdict(figure) | {"over_stock_interval": ends}


def _section(results: Results, rows: Sequence[SweepRow]) -> _Section:
    point, arms = rows[0].point, [row.arm for row in rows]
    runs = {
        arm: {key.seed: run for key, run in results.runs.items() if key[:2] == (point, arm)}
        for arm in arms
    }
    lines = point_cells(rows, is_brief=False)
    shown = list(_point_plots(point, runs, results.caption))
    return _Section(point_title(point), arms, len(rows[0].seeds), lines, shown)


def _point_plots(point: SweepPoint, runs: plots.ArmRuns, caption: str) -> Iterator[_Plot]:
    title, stem = point_title(point), _stem(point)
    png = plots.distributions(runs, title, caption)
    yield _Plot("How soon answers begin, and how long they halt", f"{stem}-cdf.png", png)
    scatter = plots.harm_scatter(runs, title, caption)
    if scatter:
        name = f"{stem}-harm.png"
        yield _Plot("Which requests answer sooner, and which later", name, scatter)
    sampled = {
        arm: (seed, run.timeline)
        for arm, of_arm in runs.items()
        for seed, run in of_arm.items()
        if run.timeline is not None
    }
    if sampled:
        seed = next(iter(sampled.values()))[0]
        timelines = {arm: timeline for arm, (_, timeline) in sampled.items()}
        png = plots.timelines(timelines, f"seed {seed}", caption)
        yield _Plot(f"The engine over time, seed {seed}", f"{stem}-timeline.png", png)


def _stem(point: SweepPoint) -> str:
    """Start of the names of a point's files; it differs between points."""
    load = "own-rate" if point.rate_per_s is None else f"rate-{point.rate_per_s:g}"
    load = load if point.rho is None else f"rho-{point.rho:g}"
    kv = f"kv-{point.kv_cap:g}" if point.kv_cap is not None else f"pool-{point.pool_tokens}"
    return re.sub(r"[^A-Za-z0-9.-]+", "-", f"{point.workload}-{load}-{kv}")
