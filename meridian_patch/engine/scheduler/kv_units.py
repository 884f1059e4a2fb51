"""Size of the KV pool in tokens, for any mix of cache groups."""

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

_WINDOWED = (SlidingWindowSpec, ChunkedLocalAttentionSpec)


def pool_tokens(scheduler: "Scheduler") -> int:
    """Size of the KV pool in tokens: a token takes its share of a block in each group that grows.

    Load-bearing: all groups take blocks of one pool. A group of full attention keeps every block of
    a request; one with a sliding window, or with chunks, keeps those of the window; a recurrent one
    keeps its state, and in mode ``all`` one for each block.
    """
    per_token = 0.0
    for group in scheduler.kv_cache_manager.coordinator.single_type_managers:
        spec = group.kv_cache_spec
        is_fixed = isinstance(spec, (*_WINDOWED, CrossAttentionSpec)) or (
            isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "all"
        )
        per_token += 0.0 if is_fixed else 1 / group.block_size
    blocks = scheduler.kv_cache_config.num_blocks - 1
    return int(blocks / per_token) if per_token else int(blocks * scheduler.block_size)
