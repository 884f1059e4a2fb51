"""Which replays a page of arms needs, and the rates that its loads mean."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from arms.registry import ARMS
from arms.replays import Key, digest
from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.simulated.arms import named_arm
from meridian_patch.bench.simulated.grid import Plan, find_points
from meridian_patch.bench.simulated.run import Offer, Workers
from meridian_patch.replay.cost import DEFAULT_COST

OURS = "latency"
SHORT_POOL = 100_000
# An 8B model in bf16 on a card of 80 GB keeps about so many tokens.
REAL_POOL = 412_000
# Settings are searched on the first, and figures come from the second. No seed is in both, nor is
# any in the calibration of the loads (90,001 and 90,002).
TUNING_SEEDS = tuple(range(301, 305))
UNSEEN_SEEDS = tuple(range(401, 417))


@dataclass(frozen=True)
class Point:
    """One load on one workload and pool.

    Attributes:
        rho: offered load over what saturated stock puts out with the same pool.
        rate: requests per second.
    """

    workload: str
    pool: int
    rho: float
    rate: float


def label(arm: str) -> str:
    """An arm as in tables."""
    return {STOCK: "stock", OURS: "ours (`latency`)"}.get(arm) or ARMS[arm].label


def find_rates(
    workloads: Sequence[str], pool: int, rhos: Sequence[float], workers: Workers, folder: Path
) -> list[Point]:
    """The points of a campaign; what stock reaches is measured once and kept in a file."""
    path = folder / "saturation.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    code = digest(STOCK)
    missing = [name for name in workloads if f"{name} {pool} {code}" not in known]
    if missing:
        plan = Plan(
            [Offer(name, 1) for name in missing], [named_arm(STOCK)], [1], DEFAULT_COST,
            pools=[pool], rhos=[1.0],
        )  # fmt: skip
        for found in find_points(plan, workers, lambda _: None):
            known[f"{found.workload} {pool} {code}"] = found.rate_per_s
        path.write_text(json.dumps(known, indent=1) + "\n")
    return [
        Point(name, pool, rho, round(rho * known[f"{name} {pool} {code}"], 4))
        for name, rho in product(workloads, rhos)
    ]


def keys(
    points: Sequence[Point], arms: Sequence[str], seeds: Sequence[int], requests: int
) -> list[Key]:
    """All replays, seed by seed, so that an interruption leaves whole seeds."""
    return [
        Key(point.workload, point.pool, point.rate, seed, requests, arm)
        for seed, point, arm in product(seeds, points, arms)
    ]
