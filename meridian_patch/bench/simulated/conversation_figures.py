"""Sums ``s-turns`` replays up: one row per history, pool, rate and arm, over its seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meridian_patch.bench.simulated.conversation_arms import INFINITE, STOCK
from meridian_patch.bench.simulated.conversation_run import TurnsRun
from meridian_patch.bench.statistics import bootstrap_interval


class Place(NamedTuple):
    """One point of a grid."""

    history: str
    pool_tokens: int
    rate_per_s: float


class RunKey(NamedTuple):
    """One replay of a grid; ``arm`` is ``SATURATED`` for the run that gives rho its unit."""

    place: Place
    arm: str
    seed: int


SATURATED = "saturated"
Runs = Mapping[RunKey, TurnsRun]


@dataclass(frozen=True)
class Figure:
    """A value over all seeds, with its 95 % bootstrap interval where there are several."""

    value: float | None
    interval: tuple[float, float] | None = None


class SeedPair(NamedTuple):
    """One seed's run of an arm beside the stock and the saturated run of the same seed."""

    ours: TurnsRun
    stock: TurnsRun
    saturated: TurnsRun
    rate_per_s: float


@dataclass(frozen=True)
class Row:
    """One arm at one point of the grid."""

    place: Place
    arm: str
    seeds: tuple[int, ...]
    figures: Mapping[str, Figure]


def offered_load(pair: SeedPair) -> float:
    """Rho: output tokens offered per second over what saturated stock puts out per second."""
    per_conversation = pair.saturated.output_tokens / pair.saturated.conversations
    return pair.rate_per_s * per_conversation / pair.saturated.steady_tokens_per_s


def _hit_share(pairs: Sequence[SeedPair]) -> float:
    return sum(p.ours.hit_tokens for p in pairs) / sum(p.ours.prompt_tokens for p in pairs)


def _bound_share(pairs: Sequence[SeedPair]) -> float:
    return sum(p.stock.bound_tokens for p in pairs) / sum(p.stock.prompt_tokens for p in pairs)


def _avoidable_misses(pairs: Sequence[SeedPair]) -> float | None:
    """(infinite - ours) / (infinite - stock), in hit tokens; None where stock misses nothing."""
    bound = sum(p.stock.bound_tokens for p in pairs)
    missed = bound - sum(p.stock.hit_tokens for p in pairs)
    return (bound - sum(p.ours.hit_tokens for p in pairs)) / missed if missed > 0 else None


def _mean(value: Callable[[TurnsRun], float]) -> Callable[[Sequence[SeedPair]], float]:
    return lambda pairs: sum(value(p.ours) for p in pairs) / len(pairs)


def _ratio(value: Callable[[TurnsRun], float]) -> Callable[[Sequence[SeedPair]], float | None]:
    def over_stock(pairs: Sequence[SeedPair]) -> float | None:
        below = sum(value(p.stock) for p in pairs)
        return sum(value(p.ours) for p in pairs) / below if below else None

    return over_stock


FIGURES: Mapping[str, Callable[[Sequence[SeedPair]], float | None]] = {
    "rho": lambda pairs: sum(map(offered_load, pairs)) / len(pairs),
    "hit_share": _hit_share,
    "avoidable_miss_share": _avoidable_misses,
    "tokens_per_s": _mean(lambda run: run.tokens_per_s),
    "tokens_per_s_over_stock": _ratio(lambda run: run.tokens_per_s),
    "ttfat_mean_s": _mean(lambda run: run.ttfat_mean_s),
    "ttfat_mean_over_stock": _ratio(lambda run: run.ttfat_mean_s),
    "ttfat_p99_s": _mean(lambda run: run.ttfat_p99_s),
    "preemptions": _mean(lambda run: run.preemptions),
    "recomputed_tokens": _mean(lambda run: run.recomputed_tokens),
}


def summarise_turns(runs: Runs) -> list[Row]:
    """Rows by place and arm, an ``infinite`` row first at each place.

    Args:
        runs: complete for each seed that they hold: stock and saturated stand beside each arm.
    """
    rows = []
    for place in sorted({key.place for key in runs}):
        arms = dict.fromkeys(key.arm for key in runs if key.place == place)
        seeds = tuple(sorted({key.seed for key in runs if key.place == place}))
        arms.pop(SATURATED)
        pairs = {arm: [_pair(runs, place, arm, seed) for seed in seeds] for arm in arms}
        bound = Figure(_bound_share(pairs[STOCK]), bootstrap_interval(pairs[STOCK], _bound_share))
        rho = _figure(pairs[STOCK], FIGURES["rho"])
        rows.append(Row(place, INFINITE, seeds, {"rho": rho, "hit_share": bound}))
        for arm in arms:
            figures = {name: _figure(pairs[arm], of) for name, of in FIGURES.items()}
            rows.append(Row(place, arm, seeds, figures))
    return rows


def _figure(
    pairs: Sequence[SeedPair], statistic: Callable[[Sequence[SeedPair]], float | None]
) -> Figure:
    return Figure(statistic(pairs), bootstrap_interval(pairs, statistic))


def _pair(runs: Runs, place: Place, arm: str, seed: int) -> SeedPair:
    return SeedPair(
        runs[RunKey(place, arm, seed)],
        runs[RunKey(place, STOCK, seed)],
        runs[RunKey(place, SATURATED, seed)],
        place.rate_per_s,
    )
