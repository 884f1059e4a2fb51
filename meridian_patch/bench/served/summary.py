"""Runs of arms, and their summary over seeds: medians, ranges and ratios to stock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.figure_table import LATE_SHARE, Figures, Kind
from meridian_patch.bench.served.arms import AMPLE, NOOP, STOCK_AGAIN
from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.metrics import (
    EMULATED_KINDS,
    FIGURE_KINDS,
    TURN_KINDS,
    request_times,
    run_figures,
)
from meridian_patch.bench.statistics import Interval, Spread, quantile, ratio_of_sums
from meridian_patch.emulation.ledger import MOST_LATE

# Few seeds can agree by luck: less is no difference that a comparison of this size shows.
LEAST_CHANCE = 1.05


@dataclass
class SeedRun:
    """One trace played on one arm.

    Attributes:
        seed: of the trace.
        end_marker: token ids that end thinking; empty when there is no thinking.
        records: one per request that was sent.
        counters: what the server's counters rose by.
        is_complete: False when the run broke off.
        block_size: tokens per block of the server's KV cache, where it is known.
        tokens: of an emulated device that one token stands for.
    """

    seed: int
    end_marker: tuple[int, ...]
    records: list[RequestRecord] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    is_complete: bool = False
    block_size: int | None = None
    tokens: int = 1

    def figures(self) -> Figures:
        """All figures of the run."""
        return run_figures(
            self.records, self.end_marker, self.counters, self.block_size, self.tokens
        )


@dataclass
class ArmRun:
    """All runs of one arm, also those that broke off.

    Attributes:
        name: of the arm.
        seeds: in the order played.
        start_s: seconds until the server was healthy.
        error: what ended the arm early.
    """

    name: str
    seeds: list[SeedRun] = field(default_factory=list)
    start_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Ratio:
    """One figure of an arm over another's, paired by seed.

    Attributes:
        by_seed: of the seeds that have one.
        value: over all seeds.
        interval: of the value; 95 %, bootstrap over seeds. None for a single seed.
    """

    by_seed: Mapping[int, float]
    value: float
    interval: Interval | None

    def is_chance(self, factor: float) -> bool:
        """Whether it shows nothing where two servers of the same code differ by this factor.

        It lies between the factor and its inverse, or its own interval holds 1.
        """
        low, high = self.interval or (self.value, self.value)
        return 1 / factor <= self.value <= factor or low <= 1 <= high


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
        has_whole_runs: False when no run was complete: its figures are not comparable.
        ttfat_s: by seed and request, for comparing the same request on two arms.
        has_turns: True where requests are turns of conversations.
    """

    name: str
    start_s: float
    seeds: dict[int, Figures]
    spreads: dict[str, Spread]
    is_partial: bool
    error: str | None
    has_whole_runs: bool
    ttfat_s: Mapping[int, Mapping[str, float]]
    has_turns: bool


def summarise(run: ArmRun) -> ArmSummary:
    """Summarise one arm over its seeds."""
    counted = counted_seeds(run)
    seeds = {seed_run.seed: seed_run.figures() for seed_run in counted}
    spreads = {}
    for kind in (*TURN_KINDS, *FIGURE_KINDS, *EMULATED_KINDS):
        values = [figures[kind.name] for figures in seeds.values()]
        spread = Spread.of([value for value in values if value is not None])
        if spread is not None:
            spreads[kind.name] = spread
    is_partial = run.error is not None or any(not seed.is_complete for seed in run.seeds)
    return ArmSummary(
        run.name,
        run.start_s,
        seeds,
        spreads,
        is_partial,
        run.error,
        any(seed.is_complete for seed in run.seeds),
        {seed_run.seed: _ttfat(seed_run) for seed_run in counted},
        any(record.request.follows for seed_run in counted for record in seed_run.records),
    )


def shown_kinds(arms: Sequence[ArmSummary]) -> tuple[Kind, ...]:
    """The figures of a comparison in the order shown; those of prefix hits only for turns."""
    turns = TURN_KINDS if any(arm.has_turns for arm in arms) else ()
    emulated = EMULATED_KINDS if any(LATE_SHARE in arm.spreads for arm in arms) else ()
    return (*turns, *FIGURE_KINDS, *emulated)


def is_certified(arms: Sequence[ArmSummary]) -> bool:
    """Whether the machine kept up with the device that it emulated, if any, in every run."""
    shares = [arm.spreads[LATE_SHARE].high for arm in arms if LATE_SHARE in arm.spreads]
    return max(shares, default=0.0) <= MOST_LATE


def counted_seeds(run: ArmRun) -> list[SeedRun]:
    """The complete runs of an arm; if none is complete, all of them."""
    return [seed for seed in run.seeds if seed.is_complete] or run.seeds


def seed_ratios(over: ArmSummary, under: ArmSummary, name: str) -> dict[int, float]:
    """``over / under`` of one figure for each seed that both have and that is not 0 below."""
    ratios = {}
    for seed, figures in over.seeds.items():
        above, below = figures.get(name), under.seeds.get(seed, {}).get(name)
        if above is not None and below:
            ratios[seed] = above / below
    return ratios


def ratio_to_stock(arms: Sequence[ArmSummary], arm: str, name: str) -> Ratio | None:
    """One figure of an arm over stock's: its sum over seeds over that of stock.

    A seed on which stock has little of it weighs little, and none needs to be left out. None when
    no seed is complete on both, or stock has nothing of it.
    """
    pair = _pair(arms, arm)
    if pair is None:
        return None
    over, under = pair
    both = []
    for seed in over.seeds.keys() & under.seeds.keys():
        above, below = over.seeds[seed].get(name), under.seeds[seed].get(name)
        if above is not None and below is not None:
            both.append((above, below))
    value, interval = ratio_of_sums(*np.array(sorted(both)).reshape(-1, 2).T)
    return None if value is None else Ratio(seed_ratios(over, under, name), value, interval)


def chance_factor(arms: Sequence[ArmSummary], name: str) -> float | None:
    """By how much two servers of the same code differ in one figure, as a factor.

    That of ``stock-again`` over ``stock``, or its inverse where that is larger, and at least
    ``LEAST_CHANCE``; of accuracy over several seeds, which how busy the machine is does not change,
    also less. A ratio between its inverse and it shows nothing. Infinite where only one of the two
    has anything of the figure. None without both arms.
    """
    if _pair(arms, STOCK_AGAIN) is None:
        return None
    is_sure = name == "accuracy" and len(_whole(arms)[STOCK_AGAIN].seeds) > 1
    least = 1.0 if is_sure else LEAST_CHANCE
    ratio = ratio_to_stock(arms, STOCK_AGAIN, name)
    if ratio is not None:
        return max(least, ratio.value, 1 / ratio.value if ratio.value else inf)
    again = _whole(arms)[STOCK_AGAIN]
    return inf if any(figures.get(name) for figures in again.seeds.values()) else least


def harm_over_stock(arms: Sequence[ArmSummary], arm: str) -> Ratio | None:
    """p99 over requests of (arm - stock) / stock in TTFAT of the same request, by seed.

    0.05 says that one request in a hundred got its answer at least 5 % later than with stock.
    """
    pair = _pair(arms, arm)
    if pair is None:
        return None
    over, under = pair
    by_seed = {}
    for seed, ours in over.ttfat_s.items():
        theirs = under.ttfat_s.get(seed, {})
        changes = [ours[name] / theirs[name] - 1 for name in ours if theirs.get(name)]
        harm = quantile(changes, 0.99)
        if harm is not None:
            by_seed[seed] = harm
    return _mean(by_seed)


def misses_over_stock(arms: Sequence[ArmSummary], arm: str) -> Ratio | None:
    """(ample - arm) / (ample - stock) in prefix hits: avoidable misses that are left, by seed.

    None without the arm ``ample``, whose pool is so large that it misses nothing avoidable. Seeds
    on which stock misses nothing either are left out.
    """
    hits = {
        name: {seed: figures["hit_share"] for seed, figures in summary.seeds.items()}
        for name, summary in _whole(arms).items()
    }
    if not {STOCK, AMPLE, arm} <= hits.keys():
        return None
    by_seed = {}
    for seed, most in hits[AMPLE].items():
        ours, theirs = hits[arm].get(seed), hits[STOCK].get(seed)
        if most is not None and ours is not None and theirs is not None and most > theirs:
            by_seed[seed] = (most - ours) / (most - theirs)
    return _mean(by_seed)


def compared_arms(arms: Sequence[ArmSummary]) -> list[str]:
    """Arms to show beside stock; those that decide as stock does only without any other."""
    names = [arm.name for arm in arms]
    if STOCK not in names:
        return []
    others = [name for name in names if name != STOCK]
    return [name for name in others if name not in (NOOP, STOCK_AGAIN)] or others


def _pair(arms: Sequence[ArmSummary], arm: str) -> tuple[ArmSummary, ArmSummary] | None:
    """An arm and stock, when both have runs that can be compared."""
    by_name = _whole(arms)
    if STOCK not in by_name or arm not in by_name:
        return None
    return by_name[arm], by_name[STOCK]


def _whole(arms: Sequence[ArmSummary]) -> dict[str, ArmSummary]:
    """Arms by name that have a complete run."""
    return {summary.name: summary for summary in arms if summary.has_whole_runs}


def _mean(by_seed: Mapping[int, float]) -> Ratio | None:
    value, interval = ratio_of_sums(list(by_seed.values()))
    return None if value is None else Ratio(by_seed, value, interval)


def _ttfat(run: SeedRun) -> dict[str, float]:
    times = ((record, request_times(record, run.end_marker)) for record in run.records)
    return {record.request.id: time.ttfat_s for record, time in times if time and time.ttfat_s}
