"""Forecasts whether the KV pool can hold the running requests and a new one until they end.

A forecast is a row of two token counts: the KV tokens that a request holds or will hold once
admitted, and those that it is expected to add before it ends.
"""

import numpy as np
from numpy.typing import NDArray

Forecasts = NDArray[np.float64]


def peak_tokens(forecasts: Forecasts) -> float:
    """The peak of the KV tokens that all requests hold together.

    Every request makes one token per step, so the pool is fullest just before one of them ends:
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
    """How many of ``waiting``, from the first on, fit beside the running requests.

    An empty engine admits one request regardless of the forecast.

    Args:
        running: [requests, 2], held and growth.
        waiting: the same, in the order of the queue.
        pool_tokens: upper bound of the peak.
    """
    together = np.concatenate((running, waiting))
    for admitted in range(len(waiting)):
        count = len(running) + admitted + 1
        if count > 1 and peak_tokens(together[:count]) > pool_tokens:
            return admitted
    return len(waiting)
