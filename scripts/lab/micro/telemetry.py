"""``telemetry-micro``: what telemetry costs per step, switched within one engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from meridian_patch.bench.progress import progress_bars
from meridian_patch.replay.cost import DEFAULT_COST, load_cost
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_template_tokens
from meridian_patch.replay.types import EngineLimits, ReplayArm, StepWork
from micro.policy import ARMS, ChatLoad
from micro.scheduler_times import CONTEXT_TOKENS, SETTLING_STEPS
from micro.telemetry_switch import (
    CORE,
    OFF,
    ON,
    SERVER,
    WIRE,
    SwitchedEngine,
    patched_api,
)
from micro.timing import (
    Rounds,
    Seconds,
    column,
    make_table,
    show,
    spread,
    take_rounds,
    write_figures,
)

PROCESSES = (CORE, WIRE, SERVER)
HEADINGS = ("running", "process", "off", "on", "telemetry", "share of a step, %")


def run_telemetry_micro(running: Sequence[int], pairs: int, seed: int, out: Path) -> int:
    """Measure, print a table and write ``telemetry-micro.json``.

    Args:
        running: requests that run.
        pairs: of steps, one with telemetry and one without.
        seed: of the load.
        out: folder.
    """
    console = Console(markup=False, emoji=False)
    rows: list[dict[str, Any]] = []
    with progress_bars(console, transient=True) as progress:
        task = progress.add_task("pairs of steps", total=len(running) * pairs)
        for many in running:
            rows += figures(many, *measure(many, pairs, seed, lambda: progress.advance(task)))
    title = f"CPU µs per step, median (p20..p80); a step as {DEFAULT_COST} takes it"
    console.print(make_table(title, HEADINGS, map(_cells, rows)))
    report = {"pairs": pairs, "seed": seed, "cost": DEFAULT_COST, "rows": rows}
    write_figures(console, out / "telemetry-micro.json", report)
    return 0


def measure(
    running: int, pairs: int, seed: int, on_pair: Callable[[], None]
) -> tuple[Rounds, float]:
    """Seconds of ``pairs`` pairs of steps of one engine, and the median step of the cost model."""
    cost, took = load_cost(DEFAULT_COST), []

    def step_seconds(work: StepWork) -> float:
        took.append(cost.step_seconds(work))
        return took[-1]

    arm = ReplayArm("latency", True, ARMS["latency"])
    engine = ReplayEngine(
        arm,
        running * CONTEXT_TOKENS // BLOCK_SIZE,
        step_seconds,
        read_template_tokens(),
        limits=EngineLimits(max_num_seqs=running),
    )
    with (
        patched_api(),
        closing(SwitchedEngine(engine, ChatLoad(running, seed).draw, running)) as switched,
    ):
        while engine.num_waiting or sum(r.num_output_tokens == 0 for r in engine.scheduler.running):
            switched.step(is_on=True)
        for _ in range(SETTLING_STEPS):
            switched.step(is_on=True)
        took.clear()
        is_first = True

        def pair() -> Iterator[tuple[str, Seconds]]:
            nonlocal is_first
            is_first = not is_first
            for is_on in (is_first, not is_first):
                yield (ON if is_on else OFF), switched.step(is_on=is_on)

        seen = take_rounds(pair, pairs, on_pair)
    return seen, float(np.median(took))


def figures(running: int, seen: Rounds, step_s: float) -> list[dict[str, Any]]:
    """Per process and in all: CPU microseconds on and off, and their difference within pairs."""
    on, off = ({name: column(seen[side], name) for name in PROCESSES} for side in (ON, OFF))
    on["all"], off["all"] = (np.sum(list(each.values()), axis=0) for each in (on, off))
    rows = []
    for process in on:
        extra = spread(on[process] - off[process])
        rows.append(
            {
                "running": running,
                "process": process,
                "off_us": float(np.median(off[process])),
                "on_us": float(np.median(on[process])),
                "extra_us": extra,
                "step_us": step_s * 1e6,
                "share_of_step": extra["p50"] / (step_s * 1e6),
            }
        )
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    """A row of figures as text, by ``HEADINGS``."""
    cells = [str(row["running"]), row["process"], f"{row['off_us']:.0f}", f"{row['on_us']:.0f}"]
    return [*cells, show(row["extra_us"], ".0f"), f"{row['share_of_step'] * 100:.2f}"]
