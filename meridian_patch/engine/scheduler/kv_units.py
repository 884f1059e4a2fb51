"""Converts KV blocks to tokens, for any mix of cache groups."""

from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)


class KVUnits(NamedTuple):
    """The KV pool in tokens: a token takes its share of a block in each group that grows.

    Attributes:
        pool_tokens: size of the pool.
        fixed_tokens: what a request holds independent of its length: its windows and its recurrent
            states.
        is_growing: False where no group grows with a request, so that there is nothing to forecast.
    """

    pool_tokens: int
    fixed_tokens: float
    is_growing: bool


def kv_units(scheduler: Any) -> KVUnits:
    """The units of a scheduler's KV cache.

    Load-bearing: all groups take blocks of one pool. A group of full attention keeps every block of
    a request; one with a sliding window, or with chunks, keeps those of the window; a recurrent one
    keeps its state, and in mode ``all`` one for each block.
    """
    per_token, fixed = 0.0, 0.0
    for group in scheduler.kv_cache_manager.coordinator.single_type_managers:
        spec, size = group.kv_cache_spec, group.block_size
        window = _window_tokens(spec)
        if window is not None:
            fixed += -(-window // size) + 1
        elif isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "all":
            fixed += 1 + spec.num_speculative_blocks
        elif not isinstance(spec, CrossAttentionSpec):
            per_token += 1 / size
    blocks = scheduler.kv_cache_config.num_blocks - 1
    if not per_token:
        return KVUnits(blocks * scheduler.block_size, 0.0, is_growing=False)
    return KVUnits(int(blocks / per_token), fixed / per_token, is_growing=True)


def _window_tokens(spec: Any) -> int | None:
    """Tokens that a request keeps of a group at most; None: all."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window - 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return None
