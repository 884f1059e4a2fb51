"""Writes the report of a served comparison: one HTML page with plots, and the same as JSON."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from meridian_patch.bench.machine import Machine
from meridian_patch.bench.served import plots
from meridian_patch.bench.served.arms import NOOP, STOCK, ArmRun, SeedRun
from meridian_patch.bench.served.load import Load
from meridian_patch.bench.served.metrics import FIGURE_KINDS
from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.summary import (
    ArmSummary,
    compared_arms,
    counted_seeds,
    harm_over_stock,
    ratio_to_stock,
    summarise,
)
from meridian_patch.bench.served.table import (
    BORROWED_NOTE,
    build_rows,
    column_titles,
    has_borrowed,
    table_title,
)

FORMAT_VERSION = 2
DATA_NAME = "report.json"
WORST_GAP = "answer_gap_max_s"


@dataclass(frozen=True)
class Origin:
    """How the figures were obtained.

    Attributes:
        date: ISO 8601, with the time zone.
        command: as typed.
        machine: at the start.
        settings: of every server.
        workload: in words.
        load: how the servers were driven.
    """

    date: str
    command: str
    machine: Machine
    settings: ServerSettings
    workload: str
    load: Load = field(default_factory=Load)

    @property
    def caption(self) -> str:
        """One line for below a plot."""
        return f"{self.machine.how} · {self.date} · {self.machine} · {self.command}"


def write_report(
    folder: Path, runs: Sequence[ArmRun], origin: Origin, data_name: str = DATA_NAME
) -> Path:
    """Write ``report.html`` and the same as JSON, for all arms that played anything.

    Args:
        folder: takes both.
        runs: one per arm.
        origin: how they were obtained.
        data_name: file name of the JSON.

    Returns:
        Path of the page.
    """
    arms = [summarise(run) for run in runs]
    document = report_data(arms, origin)
    (folder / data_name).write_text(json.dumps(document, indent=1) + "\n")
    page = folder / "report.html"
    page.write_text(_render(arms, runs, origin))
    return page


def report_data(arms: Sequence[ArmSummary], origin: Origin) -> dict[str, Any]:
    """The report as plain data; times in seconds."""
    return {
        "version": FORMAT_VERSION,
        "how": origin.machine.how,
        "date": origin.date,
        "command": origin.command,
        "machine": asdict(origin.machine),
        "settings": asdict(origin.settings) | {"model": str(origin.settings.model)},
        "load": asdict(origin.load),
        "workload": origin.workload,
        "arms": {arm.name: _arm_data(arm) for arm in arms},
        "over_stock": {arm.name: _ratio_data(arms, arm.name) for arm in arms if arm.name != STOCK},
    }


def _arm_data(arm: ArmSummary) -> dict[str, Any]:
    return {
        "start_s": arm.start_s,
        "is_partial": arm.is_partial,
        "error": arm.error,
        "over_seeds": {name: asdict(spread) for name, spread in arm.spreads.items()},
        "by_seed": {str(seed): figures for seed, figures in arm.seeds.items()},
    }


def _ratio_data(arms: Sequence[ArmSummary], arm: str) -> dict[str, Any]:
    """Ratios by figure; empty where nothing was played on both."""
    ratios = {kind.name: ratio_to_stock(arms, arm, kind.name) for kind in FIGURE_KINDS}
    ratios["harm_p99"] = harm_over_stock(arms, arm)
    return {name: asdict(ratio) for name, ratio in ratios.items() if ratio is not None}


def _render(arms: Sequence[ArmSummary], runs: Sequence[ArmRun], origin: Origin) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = files("meridian_patch.bench.served").joinpath("report.html.j2").read_text()
    rows = build_rows(arms)
    worst = {name: ratio_to_stock(arms, name, WORST_GAP) for name in compared_arms(arms)}
    return environment.from_string(source).render(
        how=origin.machine.how,
        origin=origin,
        arms=arms,
        title=table_title(arms),
        titles=column_titles(arms),
        rows=rows,
        note=BORROWED_NOTE if has_borrowed(rows) else "",
        worst={name: ratio.by_seed for name, ratio in worst.items() if ratio},
        plots=_plots(runs, origin.caption),
        seeds=max((len(arm.seeds) for arm in arms), default=0),
    )


def _plots(runs: Sequence[ArmRun], caption: str) -> list[dict[str, str]]:
    """Plots of the first seed of each arm; none when no arm played one."""
    shown: dict[str, SeedRun] = {}
    for run in runs:
        seeds = counted_seeds(run)
        if seeds and seeds[0].records:
            shown[run.name] = seeds[0]
    if not shown:
        return []
    pair = {name: run for name, run in shown.items() if name != NOOP} or shown
    return [
        {
            "title": "Answer gaps over the run",
            "text": "Each point is the time a reader waited between two tokens of an answer, at "
            "the moment the wait ended. Above the dashed line it counts as a stall.",
            "data": data_url(plots.gap_timeline(shown, caption)),
        },
        {
            "title": "What each request was doing",
            "text": "One bar per request, in the order of arrival, the same requests in each "
            "panel. A paused thought costs nobody a stalled line of text; a stalled answer does.",
            "data": data_url(plots.phase_bars(pair, caption)),
        },
        {
            "title": "Distributions",
            "text": "Left, further left and lower is better; right, further left is better.",
            "data": data_url(plots.distributions(shown, caption)),
        },
    ]


def data_url(png: bytes) -> str:
    """A picture as an address, so that a page is one file."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
