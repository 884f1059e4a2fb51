"""Writes what a calibration found: a page with the curves, and the same as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meridian_patch.bench.report import data_url, write_json, write_page
from meridian_patch.calibrate.observe import Natural
from meridian_patch.calibrate.outcome import Goal, StrategyOutcome, mean_natural_answer_tokens
from meridian_patch.calibrate.plots import accuracy_curves
from meridian_patch.calibrate.profile import CURVE_COLUMNS, curve_rows

FORMAT_VERSION = 1
RESULT, PAGE, PROFILE = "result.json", "report.html", "profile.yaml"


def write_report(
    folder: Path,
    naturals: Sequence[Natural],
    outcomes: Sequence[StrategyOutcome],
    goal: Goal,
    origin: Mapping[str, Any],
) -> list[Path]:
    """Write ``report.html`` and ``result.json``; their paths.

    Args:
        folder: exists.
        naturals: problems with a thought.
        outcomes: of each strategy.
        goal: that was asked for.
        origin: model, data, date and whatever else says how it was obtained.
    """
    page, result = folder / PAGE, folder / RESULT
    write_json(result, result_data(naturals, outcomes, goal, origin))
    tokens = _mean_think_tokens(naturals)
    caption = f"{origin['model']['name']} · {origin['data']} · {origin['date']}"
    write_page(
        page,
        "meridian_patch.calibrate",
        origin=origin,
        goal=goal,
        natural=outcomes[0].calibration.natural_accuracy,
        natural_tokens=tokens,
        natural_answer=mean_natural_answer_tokens(naturals),
        outcomes=outcomes,
        verdicts=[verdict(outcome, goal) for outcome in outcomes],
        shown=_shown,
        cells=_cells,
        plot=data_url(accuracy_curves(outcomes, goal, tokens, caption)),
    )
    return [page, result]


def result_data(
    naturals: Sequence[Natural],
    outcomes: Sequence[StrategyOutcome],
    goal: Goal,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """The report as plain data; shares from 0 to 1, lengths in tokens."""
    return {
        "version": FORMAT_VERSION,
        **origin,
        "epsilon": goal.epsilon,
        "confidence": goal.confidence,
        "epsilon_per_strategy": goal.tolerance,
        "natural": {
            "accuracy": outcomes[0].calibration.natural_accuracy,
            "mean_think_tokens": _mean_think_tokens(naturals),
            "mean_answer_tokens": mean_natural_answer_tokens(naturals),
        },
        "curve_columns": [*CURVE_COLUMNS, "mean_think_tokens", "saving_band", "loss_band"],
        "strategies": {outcome.kind.name: _strategy_data(outcome) for outcome in outcomes},
        "problems": [
            {
                "id": natural.problem.name,
                "think_tokens": len(natural.thought),
                "answer_tokens": natural.answer_tokens,
                "is_correct": natural.is_correct,
            }
            for natural in naturals
        ],
    }


def verdict(outcome: StrategyOutcome, goal: Goal) -> str:
    """What was found about one strategy, in a sentence."""
    name, chosen, count = outcome.kind.name, outcome.chosen, outcome.calibration.num_problems
    if chosen is None:
        return (
            f"{name}: no threshold saves think tokens and is proven to lose at most "
            f"{goal.tolerance:.2%} of the problems; it is switched off in the profile."
        )
    bands = outcome.bands[outcome.calibration.curve.index(chosen)]
    low, high = bands.saving_ratio
    return (
        f"{name}: {outcome.kind.key} {chosen.threshold:.4g} saves {chosen.saving_ratio:.1%} "
        f"({low:.1%} to {high:.1%}) of the think tokens. {chosen.lost} of {count} problems are "
        f"lost, {chosen.won} won; of all problems like these at most {chosen.lost_bound:.2%} are "
        f"lost, with confidence {1 - goal.risk:.2%}."
    )


def _strategy_data(outcome: StrategyOutcome) -> dict[str, Any]:
    extra = zip(outcome.mean_think_tokens, outcome.bands, strict=True)
    rows = zip(curve_rows(outcome), extra, strict=True)
    chosen = outcome.chosen
    return {
        "key": outcome.kind.key,
        "chosen": None if chosen is None else chosen._asdict(),
        "mean_answer_tokens": outcome.mean_answer_tokens,
        "curve": [
            [*row, mean, band.saving_ratio, band.accuracy_loss] for row, (mean, band) in rows
        ],
    }


def _shown(outcome: StrategyOutcome) -> range:
    """Indices of the points to show: of those that close nothing only the last."""
    curve = outcome.calibration.curve
    idle = sum(point.saving_ratio == 0 for point in curve)
    return range(max(0, idle - 1), len(curve))


def _cells(outcome: StrategyOutcome, place: int) -> list[str]:
    point = outcome.calibration.curve[place]
    bands = outcome.bands[place]
    return [
        f"{point.threshold:.4g}",
        f"{outcome.mean_think_tokens[place]:,.0f}",
        f"{point.saving_ratio:.1%} ({bands.saving_ratio[0]:.1%} to {bands.saving_ratio[1]:.1%})",
        f"{point.accuracy:.1%}",
        f"{bands.accuracy_loss[0]:.1%} to {bands.accuracy_loss[1]:.1%}",
        str(point.lost),
        str(point.won),
        f"{point.lost_bound:.2%}",
        f"{point.hoeffding_bound:.2%}",
        f"{point.conformal_risk:.2%}",
        "yes" if point.is_safe else "no",
    ]


def _mean_think_tokens(naturals: Sequence[Natural]) -> float:
    return sum(len(natural.thought) for natural in naturals) / len(naturals)
