"""Measures what a stock server completes per second on this machine, and chooses a rate by it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from meridian_patch import envs
from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.progress import progress_bars
from meridian_patch.bench.served.arms import KNOWN_ARMS
from meridian_patch.bench.served.load import Load
from meridian_patch.bench.served.run import describe_failures, play_seed, start_arm
from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.summary import ArmRun
from meridian_patch.bench.served.workload import Mix, make_trace
from meridian_patch.errors import BenchError

# Of what stock completes when it is never idle and all fits. Bursts fill a small pool.
CAPACITY_SHARE = 0.35
# Of no trace that is compared.
_SEED = 1_000_005
_REQUESTS = 80
# The last few run alone: their times are not those of a busy server.
_COUNTED_SHARE = 0.9
# Holds all that runs: where requests preempt each other, one run completes twice what another does.
_ROOMY_POOL = 8


def measure_capacity(settings: ServerSettings, load: Load, folder: Path, console: Console) -> float:
    """Start a stock server and measure how many requests it completes per second.

    All requests come at once, and the KV pool holds them all.

    Args:
        settings: of the server.
        load: how it is driven.
        folder: takes the server's log.
        console: shows how far it is.

    Raises:
        BenchError: the server failed, or a request did.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = make_trace(Mix(_REQUESTS, rate_per_s=1.0), _SEED)
    trace = [replace(request, arrival_s=0.0) for request in drawn]
    arm, run = replace(KNOWN_ARMS[STOCK], pool_factor=_ROOMY_POOL), ArmRun(STOCK)
    env, log = dict(envs.environment()), folder / "server-capacity.log"
    with progress_bars(console, transient=True) as progress:
        task = progress.add_task("what stock completes on this machine", total=len(trace))
        advance = partial(progress.advance, task)
        with start_arm(run, arm, settings, env, load, log_path=log) as running:
            play_seed(running, _SEED, trace, load.processes, advance)
    [played] = run.seeds
    failures = describe_failures(played.records)
    if failures is not None:
        raise BenchError(f"while the machine's capacity was measured, {failures}. See {log}")
    return completed_per_s([record.token_s[-1] for record in played.records])


def bearable_rate(
    settings: ServerSettings, load: Load, share: float, folder: Path, console: Console
) -> tuple[float, str]:
    """Requests per second that this machine can serve; also say what stock completes.

    Args and errors as of ``measure_capacity``; ``share`` is the rate over what stock completes.
    """
    capacity = measure_capacity(settings, load, folder, console)
    words = f"Stock completes {capacity:.2f} per second here when all come at once and fit."
    return round(share * capacity, 2), words


def completed_per_s(ends_s: Sequence[float]) -> float:
    """Requests completed per second, by when each ended. The last tenth does not count."""
    counted = max(1, int(_COUNTED_SHARE * len(ends_s)))
    return counted / sorted(ends_s)[counted - 1]
