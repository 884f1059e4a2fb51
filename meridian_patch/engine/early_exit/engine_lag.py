"""Reads off a scheduler how long an engine takes from a token to what is made of it."""

from typing import Any

from meridian_patch.exit.lag import Lag


def pace_of(scheduler: Any) -> dict[str, int]:
    """The fields of ``Lag`` that are the engine's, of stock's scheduler or ours."""
    config = scheduler.vllm_config
    # Load-bearing: so many steps are scheduled before the first one's output is taken in.
    batches = int(config.max_concurrent_batches)
    # Load-bearing: under asynchronous scheduling a request is in every step, or with pipeline
    # parallelism in one of so many; otherwise its token must be known before its next step.
    stride = getattr(scheduler, "decode_stagger", batches)
    return {
        "batches_in_flight": batches,
        "stride_steps": int(stride),
        "block_tokens": int(scheduler.block_size),
    }


def lag_of(scheduler: Any, probe_every_steps: int) -> Lag:
    """How long a close takes in this engine."""
    return Lag(**pace_of(scheduler), probe_every_steps=probe_every_steps)
