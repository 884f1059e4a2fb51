"""Which of a request's blocks other requests use too."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


def count_shared(blocks: Sequence[Any]) -> int:
    """How many leading blocks of a request have another holder.

    Args:
        blocks: of one cache group, in order. Null blocks count as shared.
    """
    # Load-bearing: who holds a block of a prefix holds those before it. Where two requests computed
    # the same prefix at once that may fail, and a block's place in the order is stock's.
    return bisect_left(range(len(blocks)), True, key=lambda i: is_own(blocks[i]))


def is_own(block: Any) -> bool:
    """True for a block that no second request holds."""
    return not block.is_null and block.ref_cnt <= 1
