"""Made-up replays for tests of what is done with their figures."""

import dataclasses

import numpy as np

from meridian_patch.bench.simulated.metrics import GAP_BORDERS_S, PerRequest
from meridian_patch.bench.simulated.run import ReplayRun


def requests(ttfat, slowdown=None, itl=None):
    rows = len(ttfat)
    fields = {field.name: np.zeros(rows) for field in dataclasses.fields(PerRequest)}
    fields["ids"] = tuple(map(str, range(rows)))
    fields["ttfat_s"] = np.array(ttfat, float)
    fields["slowdown"] = np.array(slowdown or [1.0] * rows, float)
    fields["answer_itl_p99_s"] = np.array(itl or [0.01] * rows, float)
    return PerRequest(**fields)


def replay_run(ttfat=(1.0, 2.0), **changes):
    figures = {"ttfat_mean_s": float(np.mean(ttfat)), "makespan_s": 4.0, "answer_stalls": 0.0}
    counts = np.ones(len(GAP_BORDERS_S) - 1, np.int64)
    made = ReplayRun(figures, requests(ttfat), counts, 100.0, {}, 1.0)
    return dataclasses.replace(made, **changes)
