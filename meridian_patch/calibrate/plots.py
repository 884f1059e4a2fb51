"""Accuracy over think tokens of each strategy, as PNG."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from meridian_patch.bench.plots import finish_axes, to_png
from meridian_patch.calibrate.outcome import Goal, StrategyOutcome

_COLOURS = {"eat": "#0072B2", "rpdi": "#D55E00"}
_HEADROOM = 0.02


def accuracy_curves(
    outcomes: Sequence[StrategyOutcome], goal: Goal, natural_tokens: float, caption: str
) -> bytes:
    """One panel per strategy: accuracy and its band, each dot a threshold.

    Args:
        outcomes: all strategies.
        goal: that was asked for.
        natural_tokens: think tokens per problem without early exit.
        caption: how it was obtained.
    """
    figure = Figure(figsize=(max(6.5, 5.5 * len(outcomes)), 4.4), layout="constrained")
    panels = figure.subplots(1, len(outcomes), sharey=True, squeeze=False)[0]
    for axes, outcome in zip(panels, outcomes, strict=True):
        colour = _COLOURS[outcome.kind.name]
        calibration = outcome.calibration
        natural = calibration.natural_accuracy
        tokens = outcome.mean_think_tokens
        low = [natural - bands.accuracy_loss[1] for bands in outcome.bands]
        high = [natural - bands.accuracy_loss[0] for bands in outcome.bands]
        accuracy = [point.accuracy for point in calibration.curve]
        axes.fill_between(tokens, low, high, color=colour, alpha=0.18, lw=0)
        axes.plot(tokens, accuracy, color=colour, marker="o", ms=4, lw=1.6, label="early exit")
        axes.plot(
            [natural_tokens], [natural], marker="s", ms=7, color="#222222", lw=0, label="natural"
        )
        axes.axhline(
            natural - goal.tolerance, color="#444444", lw=0.9, ls="--", label="loss allowed"
        )
        if outcome.chosen is not None:
            place = calibration.curve.index(outcome.chosen)
            axes.plot(
                [tokens[place]],
                [accuracy[place]],
                "o",
                ms=12,
                mfc="none",
                mew=2,
                color=colour,
                label=f"chosen: {outcome.kind.symbol} = {outcome.chosen.threshold:.3g}",
            )
        axes.set_xlim(left=0, right=natural_tokens * (1 + _HEADROOM))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("think tokens per problem")
        axes.legend(frameon=False, loc="lower right", fontsize=8)
        finish_axes(figure, axes, outcome.kind.name)
    panels[0].set_ylabel("right answers")
    return to_png(figure, caption)
