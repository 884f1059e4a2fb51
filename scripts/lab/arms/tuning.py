"""One search for all arms alike: each setting by itself, on seeds that no page shows."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from arms.campaign import Point
from arms.registry import ARMS
from arms.replays import Key
from arms.results import Results
from meridian_patch.bench.simulated.run import Workers


def tune(
    results: Results,
    points: Sequence[Point],
    arms: Sequence[str],
    seeds: Sequence[int],
    requests: int,
    workers: Workers,
) -> None:
    """Print the mean over seeds and points of the ok share and of the slowdown for each setting."""
    rows = [(arm, setting) for arm in arms if arm in ARMS for setting in _settings(arm)]
    keys = {
        row: [
            Key(point.workload, point.pool, point.rate, seed, requests, *row)
            for point, seed in product(points, seeds)
        ]
        for row in rows
    }
    results.complete([key for row in rows for key in keys[row]], workers)
    print("| arm | setting | ok share | slowdown p99 | TTFAT mean, s |\n|---|---|---|---|---|")
    for row in rows:
        arm, setting = row
        figures = [results.lines[key].figures for key in keys[row]]
        ok, slowdown, ttfat = (
            np.mean([each[name] for each in figures])
            for name in ("ok_share", "slowdown_p99", "ttfat_mean_s")
        )
        words = ", ".join(f"{name} {value}" for name, value in setting) or "as it is"
        print(f"| {arm} | {words} | {ok:.3f} | {slowdown:.1f} | {ttfat:.1f} |")


def _settings(arm: str) -> Iterator[tuple[tuple[str, Any], ...]]:
    entry = ARMS[arm]
    yield ()
    for name, values in entry.grid.items():
        now = entry.settings.get(name, getattr(entry.mixin, name))
        yield from (((name, value),) for value in values if value != now)
