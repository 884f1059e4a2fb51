"""Leaves out bookkeeping of vLLM that no replay reads: most of that of a decoded token.

A decoded token usually needs no KV block and completes none. Upstream then asks every layer of its
KV manager, twice, and changes nothing. No worker exists that would read what a step's output tells
it of requests that run already. No decision depends on either; a contract test compares figures.
"""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager as UpstreamManager
    from vllm.v1.core.sched.scheduler import Scheduler as UpstreamScheduler
else:
    UpstreamManager = UpstreamScheduler = object

_GROUP_0 = make_block_hash_with_group_id(BlockHash(b""), 0)


class LeanKVCaching(UpstreamManager):
    """Mixin over vLLM's ``KVCacheManager``: returns at once where upstream would change nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.coordinator.single_type_managers
        # Load-bearing: with one group of full attention no block is skipped, and a block is cached
        # when its last token is known.
        assert len(managers) == 1
        assert type(managers[0].kv_cache_spec) is FullAttentionSpec
        self._size: int = managers[0].block_size
        self._blocks: dict[str, list[Any]] = managers[0].req_to_blocks
        self._cached: dict[str, int] = managers[0].num_cached_block
        # Long prompts at the head of a queue are looked up block by block, in each step.
        self.block_pool.get_cached_block = _lookup(self.block_pool)

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        # Load-bearing: upstream gives a running request's look-ahead and no more; what it gives for
        # a waiting one, such as hits, is handled upstream.
        if num_new_tokens == 1 and len(kwargs) == 1 and not kwargs.get("num_lookahead_tokens", 1):
            name, tokens = request.request_id, request.num_computed_tokens + 1
            has_room = tokens <= len(self._blocks.get(name, ())) * self._size
            known = min(tokens, len(request._all_token_ids)) // self._size
            if has_room and known <= self._cached.get(name, 0):
                return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens // self._size > self._cached.get(request.request_id, 0):
            super().cache_blocks(request, num_computed_tokens)


class LeanScheduling(UpstreamScheduler):
    """Mixin over vLLM's schedulers: tells no worker about requests that run already."""

    def _make_cached_request_data(
        self, running_reqs: Any, resumed_reqs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.connector is not None:
            # A connector reads it.
            return super()._make_cached_request_data(running_reqs, resumed_reqs, *args, **kwargs)
        data = CachedRequestData.make_empty()
        data.resumed_req_ids = {request.request_id for request in resumed_reqs}
        return data


def _lookup(pool: Any) -> Any:
    """``BlockPool.get_cached_block`` for one group, with one call in place of five."""

    def get_cached_block(block_hash: bytes, _group_ids: list[int]) -> list[Any] | None:
        # Load-bearing: the key is the hash with the group's number, 0; several blocks of one
        # content are a dictionary.
        blocks = pool.cached_block_hash_to_block._cache.get(block_hash + _GROUP_0)
        if type(blocks) is dict:
            return [next(iter(blocks.values()))]
        return None if blocks is None else [blocks]

    return get_cached_block


def lean_manager(original: type) -> type:
    """A lean subclass of vLLM's KV cache manager."""
    return type("LeanKVCacheManager", (LeanKVCaching, original), {"__module__": __name__})


def lean_scheduler(original: type) -> type:
    """A lean subclass of one of vLLM's schedulers."""
    return type(f"Lean{original.__name__}", (LeanScheduling, original), {"__module__": __name__})
