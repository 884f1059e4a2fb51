"""Finds which blocks of a request other requests also hold."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


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
