"""Whether the KV pool will hold what runs and a newcomer until they end."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Forecast(NamedTuple):
    """What a request holds and is expected to add before it ends.

    Attributes:
        held_tokens: KV tokens that only this request holds, or will hold once admitted.
        growth_tokens: tokens still to come.
    """

    held_tokens: float
    growth_tokens: float


def peak_tokens(forecasts: Sequence[Forecast]) -> float:
    """The most KV tokens that all of them hold at one time.

    All make one token per step, so the pool is fullest just before one of them ends:
    ``max_k (sum of held_1..k + k * growth_k)`` with growths in falling order (Past-Future
    scheduling, ASPLOS 2025, section 4).
    """
    if not forecasts:
        return 0.0
    table = np.array(forecasts)
    table = table[np.argsort(-table[:, 1], kind="stable")]
    return float(np.max(np.cumsum(table[:, 0]) + np.arange(1, len(table) + 1) * table[:, 1]))


def count_admissible(
    running: Sequence[Forecast], waiting: Sequence[Forecast], pool_tokens: float
) -> int:
    """How many of ``waiting``, from the first on, fit in beside what runs.

    An empty engine takes one whatever the forecast says.
    """
    together = list(running)
    for admitted, newcomer in enumerate(waiting):
        together.append(newcomer)
        if peak_tokens(together) > pool_tokens and len(together) > 1:
            return admitted
    return len(waiting)
