"""Whether the KV pool will hold what runs and a newcomer until they end.

A forecast is a row of two token counts: what a request alone holds of the pool, or will hold once
admitted, and what it is expected to add before it ends.
"""

import numpy as np
from numpy.typing import NDArray

Forecasts = NDArray[np.float64]


def peak_tokens(forecasts: Forecasts) -> float:
    """The most KV tokens that all of them hold at one time.

    All make one token per step, so the pool is fullest just before one of them ends:
    ``max_k (sum of held_1..k + k * growth_k)`` with growths in falling order (Past-Future
    scheduling, ASPLOS 2025, section 4).

    Args:
        forecasts: [requests, 2], held and growth.
    """
    if not len(forecasts):
        return 0.0
    held, growth = forecasts[np.argsort(-forecasts[:, 1], kind="stable")].T
    return float(np.max(np.cumsum(held) + np.arange(1, len(held) + 1) * growth))


def count_admissible(running: Forecasts, waiting: Forecasts, pool_tokens: float) -> int:
    """How many of ``waiting``, from the first on, fit in beside what runs.

    An empty engine takes one whatever the forecast says.

    Args:
        running: [requests, 2], held and growth.
        waiting: the same, in the order of the queue.
        pool_tokens: that the peak may come to.
    """
    together = np.concatenate((running, waiting))
    for admitted in range(len(waiting)):
        count = len(running) + admitted + 1
        if count > 1 and peak_tokens(together[:count]) > pool_tokens:
            return admitted
    return len(waiting)
