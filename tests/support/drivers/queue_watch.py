"""Looks into a tiered queue from outside: by walking its links, not by asking it."""

from collections.abc import Callable, Iterator
from typing import Any

from meridian_patch.policy.retention import Tier

# Fences that end a tier; those behind them mark ages inside the last one.
TIER_FENCES = len(Tier)


def walk_tiers(queue: Any) -> list[list[int]]:
    """Block ids from front to back: blank ones, then by tier."""
    tiers: list[list[int]] = [[] for _ in range(1 + len(Tier))]
    fences_seen = 0
    node = queue.front.next_free_block
    while node.next_free_block is not None:
        if node.block_id >= 0:
            tiers[min(fences_seen, TIER_FENCES)].append(node.block_id)
        else:
            fences_seen += 1
        node = node.next_free_block
    return tiers


def link_faults(queue: Any) -> Iterator[str]:
    """Links that disagree, and counts that are wrong."""
    node, length = queue.front, 0
    while node.next_free_block is not None:
        if node.next_free_block.prev_free_block is not node:
            yield f"{node.next_free_block.block_id} does not link back to {node.block_id}"
        node = node.next_free_block
        length += node.block_id >= 0
    if length != queue.num_free_blocks:
        yield f"{length} blocks in the queue, which counts {queue.num_free_blocks}"


def give_hash(block: Any, end: int) -> None:
    """Make a block one that is cached, as the last of a prefix of ``end`` tokens."""
    block.reset_hash()
    block.set_block_hash(f"{block.block_id}-{end}".encode(), num_tokens=end)


def watch_evictions(pool: Any) -> Callable[[], int]:
    """Counts what the pool itself evicts from its cache when it hands blocks out."""
    evict, number = pool._maybe_evict_cached_block, 0

    def watched(block: Any) -> bool:
        nonlocal number
        is_evicted: bool = evict(block)
        number += is_evicted
        return is_evicted

    pool._maybe_evict_cached_block = watched
    return lambda: number
