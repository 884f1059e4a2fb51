"""Finds which blocks of a request other requests also hold."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def count_shared(blocks: Sequence[Any]) -> int:
    """How many leading blocks of a request have another holder.

    Args:
        blocks: of one cache group, in order. Null blocks count as shared.
    """
    # Load-bearing: a request that holds a block of a prefix holds all blocks before it. This may
    # not hold if two requests computed the same prefix at once; a block may then be evicted in
    # stock's order.
    return bisect_left(range(len(blocks)), True, key=lambda i: is_own(blocks[i]))


def is_own(block: Any) -> bool:
    """Whether no second request holds the block; False for null blocks."""
    return not block.is_null and block.ref_cnt <= 1


def held_tokens(manager: Any, request: "Request", tokens: int) -> int:
    """Tokens of the request's prefix that are in the cache and that running requests hold.

    The same tokens may be cached twice, with only one copy held. Load-bearing: a look-up finds the
    copy that was cached first.
    """
    full = list(full_attention(manager))
    # A hit is as long as the shortest one among the groups. Groups without full attention may have
    # a shorter one, so nothing is counted unless they have the blocks at the end of the prefix.
    common = min((_held_prefix(group, request, tokens - 1) for group in full), default=0)
    groups = manager.coordinator.single_type_managers
    if any(not _has_end(group, request, common) for group in groups if group not in full):
        return 0
    return common


def drops_last_block(manager: Any) -> bool:
    """Whether the last block of a hit is computed again, as where EAGLE drafts."""
    coordinator = manager.coordinator
    # Load-bearing: from vLLM 0.33 on a group may be flagged and drop nothing.
    return bool(getattr(coordinator, "drop_eagle_group_ids", coordinator.eagle_group_ids))


def tokens_behind_hits(scheduler: "Scheduler") -> int:
    """Tokens that must stand behind a block for a hit to end with it."""
    if drops_last_block(scheduler.kv_cache_manager):
        return int(scheduler.block_size)
    # Load-bearing: from vLLM 0.33 on a block's hash may cover tokens behind it, for EAGLE.
    return int(getattr(scheduler, "num_hash_lookahead_tokens", 0))


def full_attention(manager: Any) -> Iterator[Any]:
    """The cache groups that keep every block of a request."""
    for group in manager.coordinator.single_type_managers:
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            yield group


def _held_prefix(group: Any, request: "Request", most_tokens: int) -> int:
    """Tokens of the request's prefix whose blocks in this group are cached and held."""
    most = most_tokens // group.block_size
    return group.block_size * bisect_left(
        range(most), True, key=lambda index: not _is_held(group, request, index)
    )


def _is_held(group: Any, request: "Request", index: int) -> bool:
    block = _cached(group, request, index)
    return block is not None and block.ref_cnt > 0


def _has_end(group: Any, request: "Request", tokens: int) -> bool:
    """Whether a group that does not keep every block has the blocks to continue at ``tokens``."""
    spec = group.kv_cache_spec
    if not isinstance(spec, SlidingWindowSpec):
        return False
    end = tokens // group.block_size
    start = max(0, end - -(-(spec.sliding_window - 1) // group.block_size))
    return all(_cached(group, request, index) is not None for index in range(start, end))


def _cached(group: Any, request: "Request", index: int) -> Any | None:
    """The group's cached block at an index of the request's prefix."""
    pool = group.block_pool
    # Load-bearing: each hash covers the whole prefix up to its own block.
    place = (index + 1) * group.block_size // pool.hash_block_size - 1
    if place >= len(request.block_hashes):
        return None
    found = pool.get_cached_block(request.block_hashes[place], [group.kv_cache_group_id])
    return found[0] if found else None
