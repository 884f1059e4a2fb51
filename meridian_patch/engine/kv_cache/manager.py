"""The phase-aware KV cache manager: vLLM's own, over tiered queues of free blocks.

Runs in the EngineCore process. It changes only the order in which free blocks are evicted, not
which blocks a request may use.
"""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.kv_cache_interface import FullAttentionSpec

from meridian_patch.config.load import process_config
from meridian_patch.engine.kv_cache.free_queue import TieredFreeQueue
from meridian_patch.engine.kv_cache.shared_blocks import count_shared, is_own
from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.policy.retention import Retention

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager as UpstreamManager
    from vllm.v1.request import Request
else:
    UpstreamManager = object


class Phases(Protocol):
    """What the manager asks of the scheduler's part, which sets itself after construction."""

    def skipped(self, request_id: str) -> Retention | None:
        """Retention of blocks that a running request no longer attends to."""

    def admitted(self, request: "Request", num_hit_tokens: int) -> None:
        """A request was admitted with this many tokens found in the cache."""


class PhaseKVCaching(UpstreamManager):
    """Mixin over vLLM's ``KVCacheManager``.

    1. Blocks freed between ``begin_free`` and ``end_free`` go into the tiers of the given
       ``Retention``; all others go where stock puts them.
    2. A block that other requests still use gets the highest tier assigned by any request.
    3. Lookups, hits, allocation and events are upstream's own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Seconds of a monotonic clock.
        self.clock: Callable[[], float] = time.monotonic
        self.phases: Phases | None = None
        managers = self.coordinator.single_type_managers
        self.pools: list[Any] = []
        self.queues: list[TieredFreeQueue] = []
        # Without prefix caching a free block holds nothing that could be hit.
        if not self.enable_caching:
            return
        retain_s = process_config().config.kv.retain_s
        self.pools += {id(m.block_pool): m.block_pool for m in managers}.values()
        for pool in self.pools:
            # Load-bearing: only the pool refers to its queue, and reads the attribute in each call.
            queue = TieredFreeQueue(pool.free_block_queue.get_all_free_blocks(), retain_s)
            pool.free_block_queue = queue
            self.queues.append(queue)
        # Load-bearing: with full attention only, allocation frees no block. The wrapper is left out
        # then, because it would cost time for every request of every step.
        if any(type(manager.kv_cache_spec) is not FullAttentionSpec for manager in managers):
            self.allocate_slots = self._allocate_and_retain

    def begin_free(self, request_id: str, retention: Retention | None) -> None:
        """Apply a retention to the blocks freed from now on, which are this request's."""
        if retention is None:
            return
        for manager in self.coordinator.single_type_managers:
            blocks = manager.req_to_blocks.get(request_id, ())
            first_behind = retention.kept_tokens // manager.block_size
            if first_behind < len(blocks) and not is_own(blocks[first_behind]):
                self._assign(blocks[first_behind : count_shared(blocks)], retention)
            manager.block_pool.free_block_queue.kept_blocks = first_behind
        for queue in self.queues:
            queue.retention = retention

    def end_free(self) -> None:
        """Stop applying the retention."""
        for queue in self.queues:
            queue.retention = None

    def new_step_starts(self) -> None:
        super().new_step_starts()
        now_s = self.clock()
        for queue in self.queues:
            queue.advance(now_s)

    def pop_blocks_for_free(self, request: "Request") -> Any:
        # The caller returns the blocks to their pool later.
        blocks = super().pop_blocks_for_free(request)
        retention = self.queues[0].retention if self.queues else None
        if retention is not None:
            self._assign(blocks, retention)
        return blocks

    def record_prefix_cache_stats(self, request: "Request", num_hits: int) -> None:
        if isinstance(request, ProbeRequest):
            return
        super().record_prefix_cache_stats(request, num_hits)
        # Load-bearing: called once per admission, after the request took the hit blocks.
        if self.phases is not None and num_hits:
            self.phases.admitted(request, num_hits)

    def reset_prefix_cache(self) -> bool:
        is_reset = super().reset_prefix_cache()
        if is_reset:
            for queue in self.queues:
                queue.blank_all()
        return is_reset

    def _allocate_and_retain(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        """``allocate_slots`` with a retention for blocks that the request no longer attends to."""
        retention = self.phases.skipped(request.request_id) if self.phases else None
        for queue in self.queues:
            queue.retention = retention
        try:
            return super().allocate_slots(request, *args, **kwargs)
        finally:
            self.end_free()

    def _assign(self, blocks: Iterable[Any], retention: Retention) -> None:
        """Assign a tier to blocks that are not free yet."""
        for block in blocks:
            # Load-bearing: a block refers to its pool.
            queue = block.pool.free_block_queue
            if not block.is_null and isinstance(queue, TieredFreeQueue):
                queue.assign(block, retention)


def build_phase_kv_cache_manager(original: type) -> type:
    """A phase-aware subclass of vLLM's KV cache manager."""
    return type("PhaseKVCacheManager", (PhaseKVCaching, original), {"__module__": __name__})
