"""The replays of a comparison, and the units of its loads and pools."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.simulated.arms import named_arm
from meridian_patch.bench.simulated.run import Offer, ReplayJob, ReplayRun, Workers, check_pool
from meridian_patch.errors import BenchError
from meridian_patch.replay.scheduler import BLOCK_SIZE
from meridian_patch.replay.types import ReplayArm

# Seeds of the saturated runs. Do not compare arms on them.
CALIBRATION_SEEDS = (90_001, 90_002)
CALIBRATION_REQUESTS = 600
UNITS = {
    "kv_cap": "KV pool over the p99 of KV tokens in use, over the steady time of a saturated stock "
    "run with a pool that holds all that can run at once",
    "rho": "offered output tokens per second over those of a saturated stock run with the same "
    "pool, in its steady time",
    "saturated": "all requests offered at once and no pauses; the steady time is from 10 % to 80 % "
    "of all output, or to the last request's admission; mean over seeds "
    f"{', '.join(map(str, CALIBRATION_SEEDS))}",
}


class SweepPoint(NamedTuple):
    """One point of a sweep; rho and KV cap are None if rate and pool were given directly."""

    workload: str
    kv_cap: float | None
    pool_tokens: int
    rho: float | None
    rate_per_s: float | None


class RunKey(NamedTuple):
    """One replay of a sweep."""

    point: SweepPoint
    arm: str
    seed: int


Runs = Mapping[RunKey, ReplayRun]


@dataclass(frozen=True)
class Plan:
    """What to replay: pools or KV caps, and rates or rhos.

    Attributes:
        rates: requests per second; None leaves a trace's arrivals as they are.
    """

    offers: Sequence[Offer]
    arms: Sequence[ReplayArm]
    seeds: Sequence[int]
    cost: str
    pools: Sequence[int] = ()
    kv_caps: Sequence[float] = ()
    rates: Sequence[float | None] = ()
    rhos: Sequence[float] = ()
    offload_gb_per_s: float | None = None

    @property
    def num_saturations(self) -> int:
        """Number of saturated runs that ``find_points`` reports."""
        pools = len(self.pools) + len(self.kv_caps)
        return len(self.offers) * (bool(self.kv_caps) + pools * bool(self.rhos))

    def offer(self, workload: str) -> Offer:
        """The offer of that name."""
        return next(offer for offer in self.offers if offer.workload == workload)


@dataclass(frozen=True)
class Saturation:
    """Throughput and KV use of stock with more requests than it can serve.

    Attributes:
        pool_tokens: None for the ample pool.
        requests_per_s: ``tokens_per_s`` over the mean output of a request.
    """

    workload: str
    pool_tokens: int | None
    tokens_per_s: float
    requests_per_s: float
    kv_p99_tokens: float


def find_points(
    plan: Plan, workers: Workers, on_saturated: Callable[[Saturation], None]
) -> list[SweepPoint]:
    """The points of the plan. Rho and KV cap are converted by saturated runs of each workload.

    Raises:
        BenchError: a saturated run failed, or a pool cannot hold the longest request.
    """
    caps: Sequence[float | None] = plan.kv_caps or [None]
    peaks = {}
    if plan.kv_caps:
        ample: list[tuple[Offer, int | None]] = [(offer, None) for offer in plan.offers]
        for found in _saturate(plan, workers, ample, on_saturated):
            peaks[found.workload] = found.kv_p99_tokens
    points: list[tuple[Offer, float | None, int]] = [
        (offer, cap, pool if cap is None else _whole(cap * peaks[offer.workload]))
        for offer, cap, pool in product(plan.offers, caps, plan.pools or [0])
    ]
    most = {}
    if plan.rhos:
        pools = [(offer, pool) for offer, _, pool in points]
        for found in _saturate(plan, workers, pools, on_saturated):
            most[found.workload, found.pool_tokens] = found.requests_per_s
    loads: Sequence[tuple[float | None, float | None]] = [
        *((rho, None) for rho in plan.rhos),
        *((None, rate) for rate in plan.rates),
    ]
    return [
        SweepPoint(
            offer.workload,
            cap,
            pool,
            rho,
            rate if rho is None else rho * most[offer.workload, pool],
        )
        for (offer, cap, pool), (rho, rate) in product(points, loads)
    ]


def plan_jobs(plan: Plan, points: Sequence[SweepPoint]) -> dict[RunKey, ReplayJob]:
    """All replays, ordered by seed so that an interruption leaves complete seeds.

    Raises:
        BenchError: a pool cannot hold the longest request of a seed.
    """
    jobs = {}
    for seed, point in product(plan.seeds, points):
        for arm in plan.arms:
            job = ReplayJob(
                plan.offer(point.workload),
                seed,
                arm,
                point.rate_per_s,
                point.pool_tokens,
                plan.cost,
                plan.offload_gb_per_s,
                has_timeline=seed == plan.seeds[0],
            )
            jobs[RunKey(point, arm.name, seed)] = job
        check_pool(job, job.trace())
    return jobs


def point_title(point: SweepPoint) -> str:
    """A point in words."""
    parts = [point.workload]
    if point.rho is not None:
        parts.append(f"rho {point.rho:g}")
    if point.rate_per_s is not None:
        parts.append(f"{point.rate_per_s:.3g} requests/s")
    if point.kv_cap is not None:
        parts.append(f"KV cap {point.kv_cap:g}")
    return f"{', '.join(parts)}, pool {point.pool_tokens:,} tokens"


def saturation_text(found: Saturation) -> str:
    """A saturation in words."""
    pool = f"{found.pool_tokens:,} tokens" if found.pool_tokens else "ample"
    return (
        f"saturated stock, {found.workload}, pool {pool}: {found.tokens_per_s:,.0f} tokens/s, "
        f"{found.requests_per_s:.3f} requests/s, KV p99 {found.kv_p99_tokens:,.0f} tokens"
    )


def run_name(key: RunKey) -> str:
    """A replay in words."""
    return f"{point_title(key.point)}, arm {key.arm}, seed {key.seed}"


def _saturate(
    plan: Plan,
    workers: Workers,
    wanted: Iterable[tuple[Offer, int | None]],
    on_saturated: Callable[[Saturation], None],
) -> Iterator[Saturation]:
    jobs = {}
    for offer, pool in dict.fromkeys(wanted):
        # A trace file does not depend on the seed.
        for seed in CALIBRATION_SEEDS[: 1 if offer.trace else None]:
            drawn = replace(offer, requests=CALIBRATION_REQUESTS)
            job = ReplayJob(
                drawn,
                seed,
                named_arm(STOCK),
                None,
                pool,
                plan.cost,
                plan.offload_gb_per_s,
                is_saturated=True,
            )
            check_pool(job, job.trace())
            jobs[offer.workload, pool, seed] = job
    runs: dict[tuple[str, int | None], list[ReplayRun]] = {}
    for (workload, pool, seed), run in workers.run(jobs):
        if isinstance(run, str):
            raise BenchError(f"saturated stock, {workload}, seed {seed}: {run}")
        runs.setdefault((workload, pool), []).append(run)
        expected = sum(key[:2] == (workload, pool) for key in jobs)
        if len(runs[workload, pool]) == expected:
            saturation = _saturation(workload, pool, runs[workload, pool])
            on_saturated(saturation)
            yield saturation


def _saturation(workload: str, pool: int | None, runs: Sequence[ReplayRun]) -> Saturation:
    def mean(values: Iterator[float | None]) -> float:
        return float(np.mean([value for value in values if value is not None]))

    tokens_per_s = mean(run.figures["steady_tokens_per_s"] for run in runs)
    output = mean((run.figures["output_tokens"] or 0) / len(run.requests.ids) for run in runs)
    kv_tokens = mean(run.kv_p99_tokens for run in runs)
    return Saturation(workload, pool, tokens_per_s, tokens_per_s / output, kv_tokens)


def _whole(tokens: float) -> int:
    return max(1, round(tokens / BLOCK_SIZE)) * BLOCK_SIZE
