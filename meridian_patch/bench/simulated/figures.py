"""Sums lab replays up: one row per place and arm, over its seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meridian_patch.bench.simulated.arms import STOCK
from meridian_patch.bench.simulated.grid import Place, Runs
from meridian_patch.bench.simulated.metrics import goodput, harm_p99
from meridian_patch.bench.simulated.run import LabRun
from meridian_patch.bench.statistics import bootstrap_quotient
from meridian_patch.errors import BenchError

HARM = "harm_p99"
GOODPUT = "goodput_per_s"
# Without stock to compare with, there is none.
PAIRED = (HARM,)


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as goodput.

    Attributes:
        slowdown: TTFAT over that of the same request alone on the engine.
        itl_s: p99 of the request's own answer gaps.
    """

    slowdown: float = 10.0
    itl_s: float = 0.1


@dataclass(frozen=True)
class Figure:
    """A figure over all seeds, with 95 % bootstrap intervals where there are several.

    Attributes:
        value: mean over seeds.
        over_stock: its mean over stock's mean; None where stock's is 0 or the figure is paired.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    over_stock: float | None = None
    over_stock_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Row:
    """One arm at one place.

    Attributes:
        seeds: of the replays that succeeded; ratios are over those of them that stock has too.
        by_seed: figure by name, of each seed.
    """

    place: Place
    arm: str
    seeds: tuple[int, ...]
    figures: Mapping[str, Figure]
    by_seed: Mapping[int, Mapping[str, float | None]]


def summarise(runs: Runs, limits: Limits) -> list[Row]:
    """Rows in the order in which places and arms stand in ``runs``.

    Raises:
        BenchError: the runs were not all obtained in the same way.
    """
    require_one_provenance(list(runs.values()))
    rows = []
    for place, arm in dict.fromkeys((key.place, key.arm) for key in runs):
        ours = {key.seed: run for key, run in runs.items() if key[:2] == (place, arm)}
        stock = {key.seed: run for key, run in runs.items() if key[:2] == (place, STOCK)}
        by_seed = {seed: _of_seed(run, stock.get(seed), limits) for seed, run in ours.items()}
        of_stock = {seed: _of_seed(run, None, limits) for seed, run in stock.items()}
        names = next(iter(by_seed.values()))
        figures = {name: _figure(name, by_seed, of_stock) for name in names}
        rows.append(Row(place, arm, tuple(by_seed), figures, by_seed))
    return rows


def require_one_provenance(runs: Sequence[LabRun]) -> str:
    """How all of the runs were obtained.

    Raises:
        BenchError: one was obtained in another way, or with another cost model, than the rest.
    """
    ways = sorted({f"{run.how}, cost model {run.cost}" for run in runs})
    if len(ways) != 1:
        raise BenchError(
            f"figures of different provenance cannot stand in one table: {'; '.join(ways)}; "
            "report them one by one"
        )
    return ways[0]


def _of_seed(run: LabRun, stock: LabRun | None, limits: Limits) -> dict[str, float | None]:
    makespan_s = run.figures["makespan_s"] or np.inf
    return {
        **run.figures,
        GOODPUT: goodput(run.requests, makespan_s, limits.slowdown, limits.itl_s),
        HARM: harm_p99(run.requests, stock.requests) if stock else None,
    }


def _figure(
    name: str,
    ours: Mapping[int, Mapping[str, float | None]],
    stock: Mapping[int, Mapping[str, float | None]],
) -> Figure:
    values = _known(name, ours, ours)
    mean, interval = _quotient(values, np.ones_like(values))
    if name in PAIRED:
        return Figure(mean, interval)
    shared = [seed for seed in ours if _is_known(name, ours, seed) and _is_known(name, stock, seed)]
    return Figure(
        mean, interval, *_quotient(_known(name, ours, shared), _known(name, stock, shared))
    )


def _quotient(
    above: NDArray[np.float64], below: NDArray[np.float64]
) -> tuple[float | None, tuple[float, float] | None]:
    total = below.sum()
    return (float(above.sum() / total), bootstrap_quotient(above, below)) if total else (None, None)


def _known(
    name: str, figures: Mapping[int, Mapping[str, float | None]], seeds: Iterable[int]
) -> NDArray[np.float64]:
    return np.array([figures[seed][name] for seed in seeds if _is_known(name, figures, seed)])


def _is_known(name: str, figures: Mapping[int, Mapping[str, float | None]], seed: int) -> bool:
    return seed in figures and figures[seed][name] is not None
