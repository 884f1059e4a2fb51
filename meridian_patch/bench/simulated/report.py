"""Writes what a sweep found: ``report.html`` with plots, ``results.json``, and the PNGs."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from meridian_patch.bench.simulated import plots
from meridian_patch.bench.simulated.cost import CostModel
from meridian_patch.bench.simulated.figures import Limits, Row, require_one_provenance
from meridian_patch.bench.simulated.grid import UNITS, Place, Plan, Runs, Saturation, place_title
from meridian_patch.bench.simulated.run import HOW
from meridian_patch.bench.simulated.tables import KINDS, NOTE, Cells, by_place, place_cells

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Origin:
    """How the figures were obtained.

    Attributes:
        date: ISO 8601, with the time zone.
        command: as typed.
        saturations: what rho and KV cap were measured against; empty where neither was asked for.
        is_partial: it was interrupted, or replays failed.
        failures: replay in words to what went wrong.
    """

    date: str
    command: str
    cost: CostModel
    plan: Plan
    limits: Limits
    saturations: Sequence[Saturation] = ()
    is_partial: bool = False
    failures: Mapping[str, str] | None = None

    @property
    def caption(self) -> str:
        """One line for below a plot."""
        return (
            f"{HOW}, cost model {self.cost.name} ({self.cost.provenance}) · {self.date} · "
            f"{self.command}"
        )


@dataclass(frozen=True)
class _Plot:
    title: str
    file: str
    png: bytes

    @property
    def data_url(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class _Section:
    title: str
    arms: Sequence[str]
    seeds: int
    lines: Sequence[Cells]
    plots: Sequence[_Plot]


def write_lab_report(
    folder: Path, rows: Sequence[Row], runs: Runs, origin: Origin, *, is_sweep: bool
) -> list[Path]:
    """Write page, data and plots.

    Args:
        folder: exists.
        rows: of ``runs``.
        runs: all that succeeded.
        origin: how they were obtained.
        is_sweep: add goodput over load.

    Returns:
        Paths of the page and of the data.

    Raises:
        BenchError: the runs were not all obtained in the same way.
    """
    provenance = require_one_provenance(list(runs.values()))
    data = folder / "results.json"
    data.write_text(json.dumps(lab_data(rows, runs, origin), indent=1) + "\n")
    sections = [_section(list(of_place), runs, origin) for of_place in by_place(rows).values()]
    across = []
    if is_sweep:
        limits = f"TTFAT slowdown <= {origin.limits.slowdown:g}, own answer ITL p99 <= "
        limits += f"{origin.limits.itl_s * 1000:g} ms"
        png = plots.goodput_load(rows, limits, origin.caption)
        across.append(_Plot("Goodput over load", "goodput.png", png))
    for plot in (*across, *(plot for section in sections for plot in section.plots)):
        (folder / plot.file).write_bytes(plot.png)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = files("meridian_patch.bench.simulated").joinpath("report.html.j2").read_text()
    page = folder / "report.html"
    page.write_text(
        environment.from_string(source).render(
            origin=origin,
            provenance=provenance,
            across=across,
            sections=sections,
            units=UNITS,
            note=NOTE,
        )
    )
    return [page, data]


def lab_data(rows: Sequence[Row], runs: Runs, origin: Origin) -> dict[str, Any]:
    """The report as plain data; shares from 0 to 1, times in seconds of the virtual clock."""
    plan = origin.plan
    return {
        "version": FORMAT_VERSION,
        "provenance": HOW,
        "date": origin.date,
        "command": origin.command,
        "is_partial": origin.is_partial,
        "failures": dict(origin.failures or {}),
        "cost_model": origin.cost.model_dump(),
        "workloads": [
            {**asdict(offer), "trace": str(offer.trace) if offer.trace else None}
            for offer in plan.offers
        ],
        "arms": {
            arm.name: {"is_patched": arm.is_patched, "settings": dict(arm.settings)}
            for arm in plan.arms
        },
        "offload_gb_per_s": plan.offload_gb_per_s,
        "limits": asdict(origin.limits),
        "units": UNITS,
        "saturations": [asdict(saturation) for saturation in origin.saturations],
        "definitions": {kind.name: kind.words for kind in KINDS if kind.words},
        "rows": [
            {
                **row.place._asdict(),
                "arm": row.arm,
                "seeds": row.seeds,
                "figures": {name: asdict(figure) for name, figure in row.figures.items()},
                "by_seed": {str(seed): figures for seed, figures in row.by_seed.items()},
            }
            for row in rows
        ],
        "runs": [
            {
                **key.place._asdict(),
                "arm": key.arm,
                "seed": key.seed,
                "wall_s": run.wall_s,
                "counters": dict(run.counters),
            }
            for key, run in runs.items()
        ],
    }


def _stem(place: Place) -> str:
    """Begin of the names of a place's files; no two places share one."""
    load = "own-rate" if place.rate_per_s is None else f"rate-{place.rate_per_s:g}"
    load = load if place.rho is None else f"rho-{place.rho:g}"
    kv = f"kv-{place.kv_cap:g}" if place.kv_cap is not None else f"pool-{place.pool_tokens}"
    return re.sub(r"[^A-Za-z0-9.-]+", "-", f"{place.workload}-{load}-{kv}")


def _section(rows: Sequence[Row], runs: Runs, origin: Origin) -> _Section:
    place, arms = rows[0].place, [row.arm for row in rows]
    of_place = {
        arm: {key.seed: run for key, run in runs.items() if key[:2] == (place, arm)} for arm in arms
    }
    title, caption = place_title(place), origin.caption
    stem = _stem(place)
    shown = [
        _Plot(
            "How soon answers begin, and how long they halt",
            f"{stem}-cdf.png",
            plots.distributions(of_place, title, caption),
        )
    ]
    scatter = plots.harm_scatter(of_place, title, caption)
    if scatter is not None:
        shown.append(_Plot("Whom it helps, and whom it harms", f"{stem}-harm.png", scatter))
    sampled = {
        arm: (seed, run.timeline)
        for arm, of_arm in of_place.items()
        for seed, run in of_arm.items()
        if run.timeline is not None
    }
    if sampled:
        seed = next(iter(sampled.values()))[0]
        timelines = {arm: timeline for arm, (_, timeline) in sampled.items()}
        png = plots.timelines(timelines, f"seed {seed}", caption)
        shown.append(_Plot(f"What was going on, seed {seed}", f"{stem}-timeline.png", png))
    lines = place_cells(rows, is_brief=False)
    return _Section(title, arms, len(rows[0].seeds), lines, shown)
