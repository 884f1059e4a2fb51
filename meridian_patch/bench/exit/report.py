"""Table, JSON and plot of ``meridian bench exit``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas
from rich import box
from rich.table import Table

from meridian_patch.bench.exit.arm_figures import TOLERANCE_PP, Figures, best_fixed
from meridian_patch.bench.exit.arms import BUDGET, CAP, EAT, EAT_RPDI, NATURAL
from meridian_patch.bench.exit.checks import Violation
from meridian_patch.bench.machine import Machine
from meridian_patch.bench.plots import finish_axes, to_png
from meridian_patch.bench.report import write_json

FORMAT_VERSION = 1
DEFINITIONS = {
    "think_tokens": "output tokens up to the boundary, it included; per problem",
    "think_ratio": "think tokens of all problems over natural's",
    "difference_pp": "accuracy less natural's, percentage points",
    "interval": "95 % percentile bootstrap over problems, paired with natural's",
    "lost": "problems that natural has right and the arm has not; won: the other way round",
    "lost_bound": "upper bound of the lost share (Clopper and Pearson), confidence 0.95, one side",
    "best fixed": f"fewest think tokens at accuracy within {TOLERANCE_PP} pp of natural",
}
_STYLES = {
    CAP: ("#8A8A8A", "s", "fixed budget (max_think_tokens)"),
    BUDGET: ("#E69F00", "^", "vLLM's thinking_token_budget"),
    NATURAL: ("#222222", "o", "natural"),
    EAT: ("#0072B2", "D", "EAT"),
    EAT_RPDI: ("#D55E00", "v", "EAT and RPDI"),
}
# Engines whose arms have the main set of problems; these are plotted.
MAIN_STAGES = ("exits", "bounds")


@dataclass(frozen=True)
class ExitOrigin:
    """How the figures were obtained.

    Attributes:
        problems: number and seed of each set.
        settings: section ``exit`` of the profile.
    """

    date: str
    command: str
    machine: Machine
    problems: Mapping[str, Mapping[str, int]]
    settings: Mapping[str, Any]


def exit_data(
    figures: Sequence[Figures], violations: Sequence[Violation], origin: ExitOrigin
) -> dict[str, Any]:
    """The report as plain data."""
    main = [each for each in figures if each.stage in MAIN_STAGES]
    return {
        "version": FORMAT_VERSION,
        "provenance": origin.machine.how,
        "date": origin.date,
        "command": origin.command,
        "machine": asdict(origin.machine),
        "problems": origin.problems,
        "exit": origin.settings,
        "definitions": DEFINITIONS,
        "arms": [each._asdict() for each in figures],
        "best_fixed": {
            kind: best.arm if (best := best_fixed(main, kind)) is not None else None
            for kind in (CAP, BUDGET)
        },
        "violations": [asdict(each) for each in violations],
    }


def exit_table(figures: Sequence[Figures], title: str) -> Table:
    """One row per arm."""
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    table.add_column("engine: arm", no_wrap=True)
    for name in ("tokens", "÷ natural", "right, %", "Δ, pp", "lost/won", "probes", "broken"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in figures:
        table.add_row(
            f"{each.stage}: {each.arm}\n",
            f"{each.think_tokens:.1f}",
            _with_interval(each.think_ratio, each.think_ratio_interval, "{:.3f}"),
            f"{100 * each.accuracy:.1f}",
            _with_interval(each.difference_pp, each.difference_pp_interval, "{:+.2f}"),
            "-" if each.lost is None else f"{each.lost}/{each.won}",
            f"{each.probes:.2f}",
            str(sum(each.violations.values())),
        )
    return table


def exit_plot(figures: Sequence[Figures], origin: ExitOrigin) -> bytes:
    """Draw accuracy (%) over think tokens per problem; one series per kind of arm.

    A series of one arm is a point, one of several (fixed budgets) a line. A dotted line marks
    natural accuracy less TOLERANCE_PP.

    Returns:
        PNG.
    """
    canvas = Canvas(figsize=(7.5, 4.6), layout="constrained")
    axes = canvas.subplots()
    main = [each for each in figures if each.stage in MAIN_STAGES]
    for kind, (colour, marker, label) in _STYLES.items():
        of_kind = [each for each in main if each.arm == kind or each.arm.startswith(f"{kind} ")]
        if not of_kind:
            continue
        of_kind.sort(key=lambda each: each.think_tokens)
        axes.plot(
            [each.think_tokens for each in of_kind],
            [100 * each.accuracy for each in of_kind],
            color=colour,
            marker=marker,
            label=label,
            lw=1.2 if len(of_kind) > 1 else 0,
        )
    natural = next(each for each in main if each.arm == NATURAL)
    axes.axhline(100 * natural.accuracy - TOLERANCE_PP, color="#222222", lw=0.8, ls=":")
    axes.set_xlabel("think tokens per problem")
    axes.set_ylabel("right answers (%)")
    axes.legend(frameon=False, loc="lower right")
    finish_axes(canvas, axes, "Early exit against fixed budgets")
    words = f"{natural.problems} fresh problems, tiny reasoner, temperature 1, {origin.machine.how}"
    return to_png(canvas, words)


def write_exit_report(
    folder: Path,
    figures: Sequence[Figures],
    violations: Sequence[Violation],
    origin: ExitOrigin,
) -> list[Path]:
    """Write ``exit.json`` and ``exit.png``; their paths."""
    document, picture = folder / "exit.json", folder / "exit.png"
    write_json(document, exit_data(figures, violations, origin))
    picture.write_bytes(exit_plot(figures, origin))
    return [document, picture]


def _with_interval(value: float | None, interval: tuple[float, float] | None, form: str) -> str:
    if value is None or interval is None:
        return "-"
    low, high = (form.format(bound) for bound in interval)
    return f"{form.format(value)}\n{low}..{high}"
