"""Made-up signals, with which a replayed model answers measure plans and probes."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.v1.worker import worker_base

from meridian_patch.engine.early_exit.signals import MeasuredSignals
from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.patching.candidate import MARK

# Mean entropy of a thought's tokens, and how far they lie from it, in nats.
_TOKEN_NATS = 0.4
_SPREAD_NATS = 0.3
# A probe's entropy halves each so many tokens of its parent's thought.
_HALF_LIFE_TOKENS = 700
_PROBE_NATS = 2.0
# Multiples of it, modulo 1, lie evenly in 0 to 1 in an order without a pattern.
_GOLDEN = 0.6180339887498949


def made_up_signals(names: tuple[str, ...], requests: Mapping[str, Any]) -> MeasuredSignals:
    """Signals of one step, in nats; the same for the same request at the same length.

    Args:
        names: of the step's measure plan.
        requests: the scheduler's, after the step was scheduled.

    Returns:
        One row of each name, see :class:`MeasuredSignals`: [number of names, 4].
    """
    rows = [_row(requests[name]) for name in names]
    return MeasuredSignals(names, None, np.array(rows, np.float32).reshape(-1, 4))


def _row(request: Any) -> tuple[float, float, float, float]:
    length = request.num_computed_tokens
    wave = 2 * (length * _GOLDEN % 1.0) - 1
    if isinstance(request, ProbeRequest):
        entropy = _PROBE_NATS * 0.5 ** (length / _HALF_LIFE_TOKENS) * (1 + 0.1 * wave)
    else:
        entropy = _TOKEN_NATS + _SPREAD_NATS * wave
    return entropy, 5.0, math.exp(-entropy), 0.001


@contextmanager
def measuring_workers() -> Iterator[None]:
    """Within this context, a new scheduler takes its workers for patched ones, which measure."""
    worker = worker_base.WorkerBase
    had_mark = MARK in vars(worker)
    before = vars(worker).get(MARK)
    setattr(worker, MARK, "replay")
    try:
        yield
    finally:
        if had_mark:
            setattr(worker, MARK, before)
        else:
            delattr(worker, MARK)
