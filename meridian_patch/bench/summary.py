"""Sums runs up over seeds: medians, ranges and ratios, as plain data for table, page and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from meridian_patch.bench.arms import ArmRun, SeedRun
from meridian_patch.bench.metrics import FIGURE_KINDS, Figures


@dataclass(frozen=True)
class Spread:
    """Median and range of one figure over seeds."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Spread of the values, or None of nothing."""
        if not values:
            return None
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its seeds.

    Attributes:
        name: of the arm.
        start_s: seconds its server took to start.
        seeds: figures by seed; only complete runs where there is one.
        spreads: by figure name; a figure that no seed has is left out.
        is_partial: True when a run broke off.
        error: what ended the arm early.
    """

    name: str
    start_s: float
    seeds: dict[int, Figures]
    spreads: dict[str, Spread]
    is_partial: bool
    error: str | None


def summarise(run: ArmRun) -> ArmSummary:
    """Sum one arm up."""
    seeds = {seed_run.seed: seed_run.figures() for seed_run in counted_seeds(run)}
    spreads = {}
    for kind in FIGURE_KINDS:
        values = [figures[kind.name] for figures in seeds.values()]
        spread = Spread.of([value for value in values if value is not None])
        if spread is not None:
            spreads[kind.name] = spread
    is_partial = run.error is not None or any(not seed.is_complete for seed in run.seeds)
    return ArmSummary(run.name, run.start_s, seeds, spreads, is_partial, run.error)


def counted_seeds(run: ArmRun) -> list[SeedRun]:
    """The complete runs of an arm; where there is none, what there is."""
    return [seed for seed in run.seeds if seed.is_complete] or run.seeds


def seed_ratios(over: ArmSummary, under: ArmSummary, name: str) -> dict[int, float]:
    """``over / under`` of one figure for each seed that both have and that is not 0 below."""
    ratios = {}
    for seed, figures in over.seeds.items():
        above, below = figures.get(name), under.seeds.get(seed, {}).get(name)
        if above is not None and below:
            ratios[seed] = above / below
    return ratios
