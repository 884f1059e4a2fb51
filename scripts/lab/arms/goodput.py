"""The highest rate at which nine requests of ten are served well, by bisection."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from arms.campaign import Point
from arms.replays import Key
from arms.results import Results
from meridian_patch.bench.simulated.run import Workers

SHARE = 0.9
# The search ends when the lowest failing rate is at most so many times the highest that does well.
_CLOSE = 1.06
_STRIDE = 1.5
_RANGE = (0.05, 8.0)


@dataclass(frozen=True)
class Goodput:
    """Of one arm on one workload and pool.

    Attributes:
        rate: requests per second; the highest played at which the share of all seeds is reached.
        over: the lowest rate played at which it is not.
    """

    workload: str
    pool: int
    arm: str
    rate: float
    over: float


def find_goodputs(
    results: Results,
    points: Sequence[Point],
    arms: Sequence[str],
    seeds: Sequence[int],
    requests: int,
    workers: Workers,
    at_once: int,
) -> list[Goodput]:
    """One search per arm and workload; ``at_once`` of them side by side."""
    saturated = {(each.workload, each.pool): each.rate / each.rho for each in points}
    tasks = [(*where, rate, arm) for where, rate in saturated.items() for arm in arms]

    def search(task: tuple[str, int, float, str]) -> Goodput:
        workload, pool, rate, arm = task

        def share(rho: float) -> float:
            keys = [
                Key(workload, pool, round(rho * rate, 4), seed, requests, arm) for seed in seeds
            ]
            results.complete(keys, workers)
            return float(np.mean([results.lines[key].figures["ok_share"] for key in keys]))

        low, high = bracket(share)
        return Goodput(workload, pool, arm, low * rate, high * rate)

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(search, tasks))


def bracket(share) -> tuple[float, float]:
    """Two loads close to each other: the lower one reaches the share, the higher one does not.

    Args:
        share: of requests served well, by load over stock's saturation.
    """
    low = high = None
    load = 1.0
    while low is None or high is None:
        if share(load) >= SHARE:
            low, load = load, load * _STRIDE
        else:
            high, load = load, load / _STRIDE
        if not _RANGE[0] < load < _RANGE[1]:
            return low or 0.0, high or load
    while high > low * _CLOSE:
        load = (low * high) ** 0.5
        low, high = (load, high) if share(load) >= SHARE else (low, load)
    return low, high
