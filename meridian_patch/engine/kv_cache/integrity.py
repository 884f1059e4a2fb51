"""Checks the invariants of a block pool's free blocks."""

from typing import Any

from meridian_patch.engine.kv_cache.free_queue import FENCE_ID


def find_faults(pool: Any) -> list[str]:
    """Describes violated invariants of a block pool; empty if there are none. O(blocks), read-only.

    1. Links agree in both directions, fences are in order, no block is in the queue twice.
    2. A block is in the queue exactly when it has no holder.

    Args:
        pool: a vLLM ``BlockPool`` whose queue is a ``TieredFreeQueue``.
    """
    faults: list[str] = []
    free = _walk(pool.free_block_queue, faults)
    if len(free) != pool.free_block_queue.num_free_blocks:
        count = pool.free_block_queue.num_free_blocks
        faults.append(f"{len(free)} blocks are in the queue, but it counts {count}")
    for block in pool.blocks:
        # The null block is never free, and upstream does not count its holders.
        if block.is_null:
            continue
        if block.ref_cnt < 0:
            faults.append(f"block {block.block_id} has {block.ref_cnt} holders")
        elif (block.ref_cnt == 0) != (block.block_id in free):
            where = "in" if block.block_id in free else "missing from"
            faults.append(
                f"block {block.block_id} has {block.ref_cnt} holders and is {where} the queue"
            )
    return faults


def _walk(queue: Any, faults: list[str]) -> set[int]:
    """Ids of the blocks in the queue."""
    free: set[int] = set()
    fences = []
    node = queue.front
    while node.next_free_block is not None:
        following = node.next_free_block
        if following.prev_free_block is not node:
            faults.append(f"block {following.block_id} does not link back to {node.block_id}")
        node = following
        if node.block_id in free:
            faults.append(f"block {node.block_id} is in the queue twice")
            break
        if node.block_id == FENCE_ID:
            fences.append(id(node))
        elif node.block_id >= 0:
            free.add(node.block_id)
    if fences != [id(fence) for fence in queue.fences]:
        faults.append(
            f"{len(fences)} fences stand in the queue, not the {len(queue.fences)} in order"
        )
    return free
