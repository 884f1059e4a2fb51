"""Estimates which tokens of a preempted request vLLM's SimpleCPUOffloadConnector would load."""

from dataclasses import fields
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id


class SimpleOffloadEstimate:
    """Counts the tokens that a request would load again instead of computing, O(1) per request.

    Calls nothing upstream that has a side effect. A store in progress counts as done: vLLM holds
    the blocks until it is. Approximate as ``OffloadEstimate`` is: of evictions it sees those of the
    request's first block and of the first after its prompt.

    In lazy mode blocks are stored when they are free and about to be reused, so the blocks of a
    preempted request are: all its tokens count.

    Args:
        manager: the connector's scheduler side, for which ``reason_against`` returned "".
    """

    has_thinking = True

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # Load-bearing: there is one cache group, it holds every token, and each block has one hash.
        self._group: int = manager.fa_gidx
        self._block_tokens: int = manager.fa_block_size
        self._is_lazy: bool = manager._lazy_mode
        self._cached = manager.cpu_block_pool.cached_block_hash_to_block

    def __call__(self, request: Any) -> int:
        """Number of the request's computed tokens that would be loaded after a preemption."""
        # Load-bearing: such a request computes its whole prompt whenever it is admitted.
        if request.skip_reading_prefix_cache:
            return 0
        computed: int = request.num_computed_tokens
        if self._is_lazy:
            return computed if computed >= self._block_tokens else 0
        state = self._manager._reqs_to_store.get(request.request_id)
        if state is None:
            return 0
        # Load-bearing: earlier blocks were passed to a store, or were in the tier already.
        stored: int = state.num_stored_blocks[self._group]
        if not stored or self._is_evicted(request, state, 0):
            return 0
        own = request.num_prompt_tokens // self._block_tokens
        if own < stored and self._is_evicted(request, state, own):
            stored = own
        # The block that is being filled, and one whose last token is not back yet.
        return min((stored + 2) * self._block_tokens, computed)

    def _is_evicted(self, request: Any, state: Any, index: int) -> bool:
        key = make_block_hash_with_group_id(request.block_hashes[index], self._group)
        if self._cached.get_one_block(key) is not None:
            return False
        block_id = state.block_ids[self._group][index]
        return block_id not in self._manager._in_flight_store_gpu_blocks


def reason_against(manager: Any, num_cache_groups: int) -> str:
    """Why a connector's scheduler side cannot be read; empty when it can."""
    from vllm.v1.simple_kv_offload.manager import StoreRequestState

    if manager is None:
        return "prefix caching is off, and this connector does nothing without it"
    if num_cache_groups != 1:
        return "the model has several groups of KV cache"
    if manager.hash_block_size != manager.fa_block_size:
        return "its blocks have several hashes each"
    missing = {"block_ids", "num_stored_blocks"} - {each.name for each in fields(StoreRequestState)}
    if missing:
        return f"this vLLM's StoreRequestState has no {', '.join(sorted(missing))}"
    # The attributes that are read at run time; raises AttributeError if one is missing.
    _ = manager._reqs_to_store.get, manager._in_flight_store_gpu_blocks
    return ""
