"""Nodes that stand between blocks in the list of free blocks."""

from vllm.v1.core.kv_cache_utils import KVCacheBlock

FENCE_ID = -2


def make_fence() -> KVCacheBlock:
    """A node that is no block; upstream's own two have the id -1."""
    return KVCacheBlock(block_id=FENCE_ID)


def link_before(node: KVCacheBlock, fence: KVCacheBlock) -> None:
    """Put a fence that is nowhere before ``node``."""
    before = node.prev_free_block
    assert before is not None
    before.next_free_block = fence
    fence.prev_free_block = before
    fence.next_free_block = node
    node.prev_free_block = fence


def unlink(fence: KVCacheBlock) -> None:
    """Take a fence out of the list."""
    before, after = fence.prev_free_block, fence.next_free_block
    assert before is not None
    assert after is not None
    before.next_free_block = after
    after.prev_free_block = before
    fence.prev_free_block = fence.next_free_block = None


def move_before(node: KVCacheBlock, first: KVCacheBlock, last: KVCacheBlock) -> None:
    """Move the neighbours from ``first`` to ``last`` before ``node``."""
    before, after = first.prev_free_block, last.next_free_block
    target = node.prev_free_block
    assert before is not None
    assert after is not None
    assert target is not None
    before.next_free_block = after
    after.prev_free_block = before
    target.next_free_block = first
    first.prev_free_block = target
    last.next_free_block = node
    node.prev_free_block = last
