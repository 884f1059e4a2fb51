"""Each target of the policy against the arms: figure, interval, met or missed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from arms.campaign import OURS, Point
from arms.goodput import Goodput
from arms.registry import ARMS
from arms.summary import MISSES, Summary, Value, quotient
from meridian_patch.bench.arms import STOCK

_ORACLE = "srpt"
_BUSY_RHO = 1.0


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        figure: its name in a line.
        over: None: by itself, the mean over seeds; or the arm that it is compared with.
        is_worst: the largest of all seeds.
        bound: at ρ up to 1, and above.
        is_least: the bound is a lower one.
        is_busy_only: only above ρ 1.
        has_turns: only of workloads whose prompts share prefixes.
    """

    title: str
    figure: str
    bound: tuple[float, float]
    over: str | None = None
    is_worst: bool = False
    is_least: bool = False
    is_busy_only: bool = False
    has_turns: bool = False


TARGETS = (
    Target("TTFAT mean ÷ oracle SRPT", "ttfat_mean_s", (1.05, 1.05), _ORACLE),
    Target("TTFAT p50 ÷ stock", "ttfat_p50_s", (1.05, 1.05), STOCK),
    Target("TTFAT slowdown p99", "slowdown_p99", (3.0, 4.0)),
    Target("worst answer gap, decode steps", "answer_gap_max_over_decode_only", (2, 2), None, True),
    Target("answer ITL p99, decode steps", "answer_itl_p99_over_decode_only", (1.15, 1.15)),
    Target("preempted answers", "preempted_answers", (0, 0), None, True),
    Target(
        "tokens/s while requests arrive ÷ stock", "window_tokens_per_s", (1.05, 1.05), STOCK,
        is_least=True,
    ),
    Target("tokens/s of the whole ÷ stock", "tokens_per_s", (0.97, 0.97), STOCK, is_least=True),
    Target("longest pause ÷ stock", "longest_pause_s", (1.2, 1.2), STOCK, is_busy_only=True),
    Target(
        "slowdown of the longest 1 % ÷ stock", "longest_slowdown", (1.2, 1.2), STOCK,
        is_busy_only=True,
    ),
    Target("avoidable prefix misses that are left", MISSES, (0.4, 0.4), has_turns=True),
)  # fmt: skip


def section(
    summary: Summary, points: Sequence[Point], goodputs: Sequence[Goodput]
) -> Iterator[str]:
    """A table with a column per point."""
    yield "## Ours against its targets"
    yield ""
    names = (f"{point.workload}, ρ {point.rho:g}" for point in points)
    yield f"| target | bound | {' | '.join(names)} |"
    yield "|---" * (len(points) + 2) + "|"
    for target in TARGETS:
        cells = (_cell(summary, point, target) for point in points)
        sign = "≥" if target.is_least else "≤"
        low, high = target.bound
        bound = f"{low:g}" if low == high else f"{low:g} / {high:g}"
        yield f"| {target.title} | {sign} {bound} | {' | '.join(cells)} |"
    yield ""
    yield from _goodput_rows(goodputs)


def _cell(summary: Summary, point: Point, target: Target) -> str:
    is_busy = point.rho > _BUSY_RHO
    if target.is_busy_only and not is_busy:
        return "–"
    ours = summary.of(point, OURS, target.figure)
    if target.has_turns and not summary.of(point, STOCK, target.figure).any():
        return "–"
    if target.is_worst:
        value = Value(float(ours.max()))
    else:
        over = np.ones_like(ours)
        if target.over is not None:
            over = summary.of(point, target.over, target.figure)
        if not over.sum():
            return "–"
        value = quotient(ours, over)
    text = f"{value.value:.2f}"
    if value.interval is not None and value.interval[0] < value.interval[1]:
        text += f" ({value.interval[0]:.2f}..{value.interval[1]:.2f})"
    return f"{text} {_verdict(value.value, target.bound[is_busy], is_least=target.is_least)}"


def _goodput_rows(goodputs: Sequence[Goodput]) -> Iterator[str]:
    by_place: dict[tuple[str, int], dict[str, float]] = {}
    for each in goodputs:
        by_place.setdefault((each.workload, each.pool), {})[each.arm] = each.rate
    rows = [(place, rates) for place, rates in by_place.items() if OURS in rates]
    if not rows:
        return
    yield "| goodput | ÷ the best arm that knows no lengths, ≥ 1.10 | ÷ oracle SRPT, ≥ 0.85 |"
    yield "|---|---|---|"
    for (workload, pool), rates in rows:
        blind = [
            rate for arm, rate in rates.items()
            if arm != OURS and not (arm in ARMS and ARMS[arm].is_oracle)
        ]  # fmt: skip
        cells = (
            _goodput_cell(rates[OURS], max(blind, default=0.0), 1.10),
            _goodput_cell(rates[OURS], rates.get(_ORACLE, 0.0), 0.85),
        )
        yield f"| {workload}, {pool:,} tokens | {' | '.join(cells)} |"
    yield ""


def _goodput_cell(ours: float, other: float, bound: float) -> str:
    if not other:
        return "–"
    return f"{ours / other:.2f} {_verdict(ours / other, bound, is_least=True)}"


def _verdict(value: float, bound: float, *, is_least: bool) -> str:
    compare: Callable[[float, float], bool] = float.__ge__ if is_least else float.__le__
    return "met" if compare(float(value), float(bound)) else "**missed**"
