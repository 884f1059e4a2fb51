"""Derives from a scheduler how many steps pass between a token and the reaction to it."""

from typing import Any

from meridian_patch.exit.lag import Lag


def pace_of(scheduler: Any) -> dict[str, int]:
    """The fields of ``Lag`` that depend on the engine, for stock's scheduler or the plug-in's."""
    config = scheduler.vllm_config
    # Load-bearing: so many steps are scheduled before the first one's output is processed.
    batches = int(config.max_concurrent_batches)
    # Load-bearing: under asynchronous scheduling a request is in every step, or in one of
    # `decode_stagger` steps with pipeline parallelism. Otherwise its token must be known before it
    # is scheduled again.
    stride = getattr(scheduler, "decode_stagger", batches)
    return {
        "batches_in_flight": batches,
        "stride_steps": int(stride),
        "block_tokens": int(scheduler.block_size),
    }


def lag_of(scheduler: Any, probe_every_steps: int) -> Lag:
    """How late a close is in this engine."""
    return Lag(**pace_of(scheduler), probe_every_steps=probe_every_steps)
