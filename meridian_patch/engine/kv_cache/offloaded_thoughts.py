"""Keeps finished thoughts out of vLLM's KV offload connectors; no later prompt would hit them."""

from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

if TYPE_CHECKING:
    from vllm.v1.request import Request


class OffloadedThoughts(Protocol):
    """What an offload connector does when a request ends whose thought later prompts drop."""

    def drop(self, request: "Request", kept_tokens: int) -> None:
        """Keep no tokens after the first ``kept_tokens`` of a request that is about to end.

        Called before the connector learns of the end.
        """


class OffloadingThoughts:
    """For OffloadingConnector: what is not stored yet is not stored.

    Chunks that were stored while the request ran stay until the tier evicts them: its manager has
    no call that gives a chunk up.

    Args:
        side: the connector's scheduler side, of one cache group.
    """

    def __init__(self, side: Any) -> None:
        self._side = side

    def drop(self, request: "Request", kept_tokens: int) -> None:
        """See ``OffloadedThoughts``."""
        state = self._side._req_status.get(request.request_id)
        if state is not None:
            # Load-bearing: the bound that a client may set, which every later store job respects.
            bound = state.max_offload_tokens
            state.max_offload_tokens = kept_tokens if bound is None else min(bound, kept_tokens)


class SimpleOffloadThoughts:
    """For SimpleCPUOffloadConnector: stored blocks are given up, and no more are stored.

    In lazy mode there is nothing to do here: the connector stores free blocks that it finds in the
    free queue, and ``TieredFreeQueue`` shows it none of a finished thought.

    Args:
        manager: the connector's scheduler side, of one cache group.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._group: int = manager.fa_gidx
        self._block_tokens: int = manager.fa_block_size

    def drop(self, request: "Request", kept_tokens: int) -> None:
        """See ``OffloadedThoughts``."""
        state = self._manager._reqs_to_store.get(request.request_id)
        if state is None:
            return
        kept = kept_tokens // self._block_tokens
        stored: int = state.num_stored_blocks[self._group]
        self._give_up(request, range(kept, min(stored, len(request.block_hashes))))
        if stored >= kept:
            # Load-bearing: upstream stores the blocks from this index on when the request ends.
            state.num_stored_blocks[self._group] = max(stored, len(request.block_hashes))

    def _give_up(self, request: "Request", indices: range) -> None:
        pool = self._manager.cpu_block_pool
        found = []
        for index in indices:
            key = make_block_hash_with_group_id(request.block_hashes[index], self._group)
            block = pool.cached_block_hash_to_block.get_one_block(key)
            # A block with references is being loaded for another request.
            if block is not None and not block.ref_cnt:
                found.append(block)
        # Load-bearing: a free block without a hash is the first to be used again.
        pool.touch(found)
        pool.evict_blocks({block.block_id for block in found})
        pool.free_blocks(found)


def build_offloaded_thoughts(connector: Any, num_cache_groups: int) -> OffloadedThoughts | None:
    """For the connectors above, in models with one group of KV cache; None for others.

    Args:
        connector: vLLM's connector, or None.
        num_cache_groups: of the KV cache.
    """
    if num_cache_groups != 1:
        return None
    # Compared by name, so that no module of a connector is imported.
    name = type(connector).__name__
    if name == "OffloadingConnector":
        return OffloadingThoughts(connector.connector_scheduler)
    if name == "SimpleCPUOffloadConnector":
        manager = connector.scheduler_manager
        if manager is not None and manager.hash_block_size == manager.fa_block_size:
            return SimpleOffloadThoughts(manager)
    return None
