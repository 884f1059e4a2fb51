"""Shows and keeps how far replay and engine are apart."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from rich.table import Table

from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.simulated.cost import CostModel
from meridian_patch.bench.simulated.validate import (
    FIGURES,
    PREEMPTIONS,
    Comparison,
    mean_errors,
    mean_figures,
    ratios,
    repeat_spread,
)


@dataclass(frozen=True)
class Load:
    """What is played: drawn problems of the tiny reasoner, greedily thought about."""

    seeds: Sequence[int]
    requests: int
    rate_per_s: float
    max_tokens: int


def _by_arm(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    names = dict.fromkeys(comparison.arm for comparison in comparisons)
    return {name: [c for c in comparisons if c.arm == name] for name in names}


def validation_table(comparisons: Sequence[Comparison]) -> Table:
    """A row per arm and figure."""
    table = Table("arm", "figure", "engine", "replay", "error", "engine's repeats apart")
    for name, of_arm in _by_arm(comparisons).items():
        engine, replay = mean_figures(of_arm)
        errors, spread = mean_errors(of_arm), repeat_spread(of_arm)
        for figure, label in FIGURES.items():
            scale = 1000 if label.endswith("ms") else 1
            form = "{:+.1f}" if figure == PREEMPTIONS else "{:+.1%}"
            apart = form.format(spread[figure]).lstrip("+") if spread else ""
            shown = [f"{figures[figure] * scale:.4g}" for figures in (engine, replay)]
            table.add_row(name, label, *shown, form.format(errors[figure]), apart)
    return table


def ratio_table(comparisons: Sequence[Comparison], base: str) -> Table | None:
    """Each arm over one of them, on the engine and in replay; None without that one."""
    by_arm = _by_arm(comparisons)
    if base not in by_arm or len(by_arm) == 1:
        return None
    table = Table("arm", f"over {base}", "engine", "replay")
    for name, of_arm in by_arm.items():
        if name == base:
            continue
        for figure, (engine, replay) in ratios(of_arm, by_arm[base]).items():
            form = "{:+.1f}" if figure == PREEMPTIONS else "{:.3f}"
            label = FIGURES[figure].removesuffix(", ms")
            table.add_row(name, label, form.format(engine), form.format(replay))
    return table


def validation_report(
    comparisons: Sequence[Comparison], cost: CostModel, load: Load, arguments: dict[str, Any]
) -> dict[str, Any]:
    """All there is to know of a validation, for JSON.

    Args:
        comparisons: of all arms, seeds and rounds.
        cost: that was replayed with.
        load: what was played.
        arguments: of ``vllm.LLM``.
    """
    arms = {}
    for name, of_arm in _by_arm(comparisons).items():
        engine, replay = mean_figures(of_arm)
        steps_s = sum(comparison.steps_s for comparison in of_arm)
        arms[name] = {
            "engine": engine,
            "replay": replay,
            "errors": mean_errors(of_arm),
            "repeats_apart": repeat_spread(of_arm),
            "pace": [comparison.pace for comparison in of_arm],
            "predicted_over_timed_steps": sum(c.predicted_steps_s for c in of_arm) / steps_s,
        }
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["meridian", *sys.argv[1:]]),
        "machine": str(describe_machine()),
        "load": asdict(load),
        "engine": {name: value for name, value in arguments.items() if name != "model"},
        "cost": cost.model_dump(exclude_none=True),
        "arms": arms,
        "comparisons": [asdict(c) | {"errors": c.errors} for c in comparisons],
    }
