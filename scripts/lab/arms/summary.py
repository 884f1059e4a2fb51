"""What the page says of an arm at a point: means over seeds with paired bootstrap intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arms.campaign import Point
from arms.replays import Key, Line
from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.statistics import ratio_of_sums

Interval = tuple[float, float] | None

HARM, MISSES = "harm", "avoidable_misses"
"""Figures of pairs: the p99 over requests of a slowdown over the same request's in stock; and the
share of stock's prefix misses that more room would avoid, and that are left."""


@dataclass(frozen=True)
class Column:
    """One figure.

    Attributes:
        figure: its name in a line.
        is_ratio: sum over seeds over stock's sum; otherwise the mean over seeds.
        is_worst: the largest of all seeds instead of the mean.
        scale: of the printed number.
        digits: after the point.
    """

    title: str
    figure: str
    is_ratio: bool = False
    is_worst: bool = False
    scale: float = 1.0
    digits: int = 2


COLUMNS = (
    Column("TTFAT mean ÷ stock", "ttfat_mean_s", is_ratio=True),
    Column("TTFAT p50 ÷ stock", "ttfat_p50_s", is_ratio=True),
    Column("slowdown p99", "slowdown_p99", digits=1),
    Column("harm: p99 of a request's slowdown ÷ its own in stock", HARM),
    Column("ok share", "ok_share"),
    Column("worst answer gap, ms", "answer_gap_max_s", is_worst=True, scale=1000, digits=0),
    Column("answer ITL p99, ms", "answer_itl_p99_s", scale=1000, digits=1),
    Column("preempted answers", "preempted_answers", digits=1),
    Column("tokens/s while requests arrive ÷ stock", "window_tokens_per_s", is_ratio=True),
    Column("makespan ÷ stock", "makespan_s", is_ratio=True),
    Column("longest pause, s", "longest_pause_s", digits=1),
    Column("slowdown of the longest 1 %", "longest_slowdown"),
)


@dataclass(frozen=True)
class Value:
    """A figure over seeds, and where most of its resamples lie."""

    value: float
    interval: Interval = None


class Summary:
    """Looks figures up by point and arm, over the seeds that every arm of the page has."""

    def __init__(
        self, lines: Mapping[Key, Line], arms: Sequence[str], seeds: Sequence[int], requests: int
    ) -> None:
        self._lines = lines
        self.requests = requests
        self.arms = arms
        self._seeds = seeds

    def seeds(self, point: Point) -> list[int]:
        """Seeds that all arms have been played on."""
        return [
            seed
            for seed in self._seeds
            if all(self._key(point, arm, seed) in self._lines for arm in self.arms)
        ]

    def of(self, point: Point, arm: str, figure: str) -> np.ndarray:
        """A figure of each seed; 0 where it has none."""
        values = [self._figure(point, arm, seed, figure) for seed in self.seeds(point)]
        return np.array([0.0 if value is None else value for value in values])

    def _figure(self, point: Point, arm: str, seed: int, figure: str) -> float | None:
        line = self._lines[self._key(point, arm, seed)]
        if figure not in (HARM, MISSES):
            return line.figures[figure]
        stock = self._lines[self._key(point, STOCK, seed)]
        if figure == HARM:
            return float(np.percentile(np.divide(line.slowdown, stock.slowdown), 99))
        bound, hits = (stock.figures.get(name) for name in ("hit_bound_share", "hit_share"))
        own = line.figures.get("hit_share")
        if bound is None or hits is None or own is None or bound <= hits:
            return None
        return (bound - own) / (bound - hits)

    def value(self, point: Point, arm: str, column: Column) -> Value:
        """A column's figure."""
        ours = self.of(point, arm, column.figure)
        if column.is_worst:
            return Value(float(ours.max()))
        below = self.of(point, STOCK, column.figure) if column.is_ratio else None
        return quotient(ours, below)

    def share_within(self, point: Point, arm: str, slowdown: float, steps: float) -> float:
        """Share of requests within these limits, over all seeds alike."""
        shares = []
        for seed in self.seeds(point):
            line = self._lines[self._key(point, arm, seed)]
            is_well = (np.array(line.slowdown) <= slowdown) & (np.array(line.steps) <= steps)
            shares.append(is_well.mean())
        return float(np.mean(shares))

    def _key(self, point: Point, arm: str, seed: int) -> Key:
        return Key(point.workload, point.pool, point.rate, seed, self.requests, arm)


def quotient(above: np.ndarray, below: np.ndarray | None) -> Value:
    """The ratio of two sums over seeds, resampled in pairs."""
    value, interval = ratio_of_sums(above, below)
    return Value(math.nan if value is None else value, interval)


def text(value: Value, column: Column) -> str:
    """A cell."""

    def number(each: float) -> str:
        return f"{each * column.scale:,.{column.digits}f}"

    low_high = value.interval
    if low_high is None or low_high[0] == low_high[1]:
        return number(value.value)
    return f"{number(value.value)} ({number(low_high[0])}..{number(low_high[1])})"
