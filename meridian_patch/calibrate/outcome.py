"""Chooses thresholds from observed problems, and says what they cost and how sure that is."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meridian_patch.bench.statistics import trials_needed
from meridian_patch.calibrate.calibration import (
    Bands,
    Calibration,
    Point,
    bootstrap_bands,
    calibrate,
)
from meridian_patch.calibrate.observe import EarlyAnswer, Natural
from meridian_patch.calibrate.records import Record, endings
from meridian_patch.calibrate.thresholds import StrategyKind
from meridian_patch.errors import CalibrationError


class Goal(NamedTuple):
    """What is asked of all strategies together.

    A problem that both strategies together lose is lost by the one that ended it, so that their
    losses and risks add up at most: each strategy gets an equal part.

    Attributes:
        epsilon: share of problems that may be lost.
        confidence: with which no more are.
        thresholds: to try, by strategy.
    """

    epsilon: float
    confidence: float
    thresholds: Mapping[StrategyKind, Sequence[float]]

    @property
    def tolerance(self) -> float:
        """Share of problems that one strategy may lose."""
        return self.epsilon / len(self.thresholds)

    @property
    def risk(self) -> float:
        """Probability that one strategy's bound does not hold."""
        return (1 - self.confidence) / len(self.thresholds)

    @property
    def trials_needed(self) -> int:
        """Fewest problems that can carry the bound."""
        return trials_needed(self.tolerance, self.risk)

    def check_count(self, count: int, where: str) -> None:
        """Raise CalibrationError when that many problems cannot carry the bound, lost or not."""
        if count >= self.trials_needed:
            return
        words = f"{where}: {count} problems are too few: to bound the loss by {self.epsilon:.2%} "
        words += f"with confidence {self.confidence:.2%} takes at least {self.trials_needed}"
        if len(self.thresholds) > 1:
            alone = trials_needed(self.epsilon, 1 - self.confidence)
            names = " and ".join(kind.name for kind in self.thresholds)
            first = next(iter(self.thresholds)).name
            words += f" while {names} share it, or {alone} for one alone (--strategies {first})"
        raise CalibrationError(f"{words}. Label more problems, or allow a greater loss or risk")


class StrategyOutcome(NamedTuple):
    """One strategy's curve and choice.

    Attributes:
        bands: of each point of the curve.
        mean_think_tokens: per problem, of each point of the curve.
        mean_answer_tokens: per problem at the chosen point; None without one.
    """

    kind: StrategyKind
    calibration: Calibration
    bands: Sequence[Bands]
    mean_think_tokens: Sequence[float]
    mean_answer_tokens: float | None

    @property
    def chosen(self) -> Point | None:
        """The point to run with; None where no threshold is safe, or the safe ones save nothing."""
        point = self.calibration.chosen
        return point if point is not None and point.saving_ratio > 0 else None


def check_naturals(naturals: Sequence[Natural], goal: Goal) -> None:
    """Refuse problems that cannot carry the bound: too few with a thought, or too few right.

    Raises:
        CalibrationError: says what is missing.
    """
    records = [Record(n.problem.name, len(n.thought), n.is_correct, ()) for n in naturals]
    for kind, thresholds in goal.thresholds.items():
        _calibrate(kind, records, thresholds, goal)


def decide(
    naturals: Sequence[Natural],
    records: Mapping[StrategyKind, Sequence[Record]],
    early_answers: Mapping[tuple[str, int], EarlyAnswer],
    goal: Goal,
) -> list[StrategyOutcome]:
    """Curve, bands and choice of each strategy.

    Raises:
        CalibrationError: the records cannot carry the bound.
    """
    outcomes = []
    for kind, of_kind in records.items():
        calibration = _calibrate(kind, of_kind, goal.thresholds[kind], goal)
        thresholds = [point.threshold for point in calibration.curve]
        tokens, _ = endings(of_kind, thresholds, fires_below=kind.fires_below)
        bands = [bootstrap_bands(of_kind, t, fires_below=kind.fires_below) for t in thresholds]
        outcome = StrategyOutcome(
            kind, calibration, bands, [float(mean) for mean in tokens.mean(axis=1)], None
        )
        if outcome.chosen is not None:
            ends = tokens[thresholds.index(outcome.chosen.threshold)]
            mean = _mean_answer_tokens(naturals, [int(end) for end in ends], early_answers)
            outcome = outcome._replace(mean_answer_tokens=mean)
        outcomes.append(outcome)
    return outcomes


def mean_natural_answer_tokens(naturals: Sequence[Natural]) -> float:
    """Answer tokens per problem without early exit."""
    return sum(natural.answer_tokens for natural in naturals) / len(naturals)


def _calibrate(
    kind: StrategyKind, records: Sequence[Record], thresholds: Sequence[float], goal: Goal
) -> Calibration:
    return calibrate(
        records,
        thresholds,
        fires_below=kind.fires_below,
        tolerance=goal.tolerance,
        risk=goal.risk,
    )


def _mean_answer_tokens(
    naturals: Sequence[Natural],
    ends: Sequence[int],
    early_answers: Mapping[tuple[str, int], EarlyAnswer],
) -> float:
    counts = [
        natural.answer_tokens
        if end == len(natural.thought)
        else early_answers[natural.problem.name, end].num_tokens
        for natural, end in zip(naturals, ends, strict=True)
    ]
    return sum(counts) / len(counts)
