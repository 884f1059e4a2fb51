"""vLLM's queue of free KV blocks, with tiers.

One doubly linked list, as in upstream, with a fence after each tier. A block is added to a tier by
inserting it before the tier's fence. Fences are nodes of upstream's own class, so that upstream's
methods can be reused: this class moves the head or tail to where a tier begins or ends, and calls
them.

    front  blank |  THINK_COMPLETE |  THINK_ACTIVE |  OUTPUT_CRITICAL  back

``blank`` holds blocks without cached content. Blocks are taken from the front.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from meridian_patch.policy.retention import Retention, Tier

# OUTPUT_CRITICAL is divided by age into this many parts, so decay is late by at most one part.
AGE_PARTS = 8
# Id of a fence, which represents no block; upstream's own head and tail nodes have the id -1.
FENCE_ID = -2


class TieredFreeQueue(FreeKVCacheBlockQueue):
    """Drop-in for ``FreeKVCacheBlockQueue``; it orders as stock does while ``retention`` is None.

    Every operation takes O(1) per block, as in upstream. Adding under a retention takes one
    bisection more. No memory is allocated per block.

    Args:
        blocks: the free blocks, in order; they start as blank.
        retain_s: age in seconds at which OUTPUT_CRITICAL blocks move to the end of THINK_ACTIVE.
    """

    fake_free_list_head: KVCacheBlock
    fake_free_list_tail: KVCacheBlock

    def __init__(self, blocks: list[KVCacheBlock], retain_s: float) -> None:
        super().__init__(blocks)
        # Retention of the request whose blocks are being freed; None adds to the highest tier.
        self.retention: Retention | None = None
        # Expected number of blocks with kept tokens; if it is right, no search is needed.
        self.kept_blocks = 0
        # Tiers of blocks that are not free yet, by block id.
        self.assigned: dict[int, Tier] = {}
        # First blocks after the kept tokens of freed requests: block id to block hash and tier.
        self._entries: dict[int, tuple[object, Tier]] = {}
        # Number of blocks taken since the last drain: blank ones, then by tier.
        self._taken = [0] * (1 + len(Tier))
        self._retain_s = retain_s
        self._next_mark_s = float("-inf")
        # Load-bearing: upstream's methods read these two attributes in each call.
        self.front = self.fake_free_list_head
        self._back = self.fake_free_list_tail
        self._blank_end = make_fence()
        # Fences of all tiers but the last, which ends at the end of the list.
        self._tier_ends = [make_fence() for _ in list(Tier)[:-1]]
        self._marks: deque[tuple[KVCacheBlock, float]] = deque()
        self._segment = 0
        self._spare_marks = [make_fence() for _ in range(AGE_PARTS)]
        # All fences, in the list's order.
        self.fences: list[KVCacheBlock] = []
        # Number of fences that the head has moved past; no block is before them.
        self._passed = 0
        self._next_fence = self._no_fence = make_fence()
        self._no_fence.next_free_block = self._no_fence
        for fence in (self._blank_end, *self._tier_ends):
            link_before(self._back, fence)
        self._renumber()

    def popleft(self) -> KVCacheBlock:
        self._pass_fences()
        block = super().popleft()
        self._taken[self._segment] += 1
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if self.fake_free_list_head.next_free_block is self._next_fence:
            self._pass_fences()
        taken = super().popleft_n(n)
        # Load-bearing: upstream unlinks taken nodes, so this shows whether a fence was taken too.
        if self._next_fence.next_free_block is None:
            return self._put_back_fences(taken)
        self._taken[self._segment] += n
        return taken

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Add cached blocks, those with the most tokens before them first."""
        if self.assigned:
            self._add_assigned(blocks)
            return
        super().append_n(blocks)
        if self.retention is not None and blocks:
            behind = count_behind(blocks, self.retention.kept_tokens, self.kept_blocks)
            if behind:
                self._move(blocks[0], blocks[behind - 1], self.retention.tier)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        if not blocks:
            return
        for block in blocks if self.assigned else ():
            self.assigned.pop(block.block_id, None)
        self._go_to_front()
        super().prepend_n(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [block for block in super().get_all_free_blocks() if block.block_id >= 0]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Blocks after ``cursor`` or from the front, without those of finished thoughts.

        Load-bearing: upstream stores the blocks that it finds here in an offload tier.
        """
        thoughts_end = self._tier_ends[Tier.THINK_COMPLETE]
        if cursor is None and self.fake_free_list_head is self._blank_end:
            cursor = thoughts_end
        for node in super().iter_blocks_after(cursor):
            if node is self._blank_end:
                yield from self.iter_blocks_after(thoughts_end)
                return
            if node.block_id >= 0:
                yield node

    def assign(self, block: KVCacheBlock, retention: Retention) -> None:
        """Set the tier of a block for when it becomes free; the highest assigned tier counts."""
        if end_of(block) > retention.kept_tokens:
            earlier = self.assigned.get(block.block_id, retention.tier)
            self.assigned[block.block_id] = max(earlier, retention.tier)

    def tier_from(self, block: KVCacheBlock) -> Tier:
        """Tier of a block and those after it, if it was the first after a request's kept tokens."""
        block_hash, tier = self._entries.get(block.block_id, (None, Tier.OUTPUT_CRITICAL))
        return tier if block_hash == block.block_hash else Tier.OUTPUT_CRITICAL

    def drain_evictions(self) -> dict[Tier, int]:
        """Number of cached blocks taken since the last call, by tier."""
        taken, self._taken = self._taken, [0] * (1 + len(Tier))
        return {tier: taken[tier + 1] for tier in Tier if taken[tier + 1]}

    def advance(self, now_s: float) -> None:
        """Let OUTPUT_CRITICAL blocks age; call once per step.

        Args:
            now_s: time of a monotonic clock.
        """
        if self._marks and now_s - self._marks[0][1] >= self._retain_s:
            self._decay(now_s)
        if now_s >= self._next_mark_s and self._spare_marks:
            self._next_mark_s = now_s + self._retain_s / AGE_PARTS
            self._go_to_front()
            mark = self._spare_marks.pop()
            link_before(self._back, mark)
            self._marks.append((mark, now_s))
            self._renumber()

    def blank_all(self) -> None:
        """Make all blocks blank, because the whole cache was reset."""
        self._go_to_front()
        self._spare_marks += [mark for mark, _ in self._marks]
        for fence in self.fences:
            unlink(fence)
        for fence in (self._blank_end, *self._tier_ends):
            link_before(self._back, fence)
        self._marks.clear()
        self._entries.clear()
        self.assigned.clear()
        self._renumber()

    def _decay(self, now_s: float) -> None:
        self._go_to_front()
        while self._marks and now_s - self._marks[0][1] >= self._retain_s:
            mark, _ = self._marks.popleft()
            # Blocks before the mark are at the end of THINK_ACTIVE from now on.
            unlink(self._tier_ends[-1])
            link_before(mark, self._tier_ends[-1])
            unlink(mark)
            self._spare_marks.append(mark)
        self._renumber()

    def _move(self, first: KVCacheBlock, last: KVCacheBlock, tier: Tier) -> None:
        """Move consecutive blocks from OUTPUT_CRITICAL to the end of ``tier``.

        Args:
            first: the block with the most tokens before it.
            last: the block nearest to the kept tokens.
            tier: the target.
        """
        self._entries[last.block_id] = last.block_hash, tier
        if tier is not Tier.OUTPUT_CRITICAL:
            if self._passed:
                self._go_to_front()
            move_before(self._tier_ends[tier], first, last)

    def _add_assigned(self, blocks: list[KVCacheBlock]) -> None:
        by_tier: dict[Tier, list[KVCacheBlock]] = {tier: [] for tier in Tier}
        for block in blocks:
            tier = Tier.OUTPUT_CRITICAL
            assigned = self.assigned.pop(block.block_id, None)
            if self.retention and end_of(block) > self.retention.kept_tokens:
                tier = max(self.retention.tier, assigned or Tier.THINK_COMPLETE)
            elif self.retention is None and assigned is not None:
                tier = assigned
            by_tier[tier].append(block)
        for tier, members in by_tier.items():
            if members:
                super().append_n(members)
                self._move(members[0], members[-1], tier)

    def _pass_fences(self) -> None:
        while self.fake_free_list_head.next_free_block is self._next_fence:
            self.fake_free_list_head = self._next_fence
            self._pass(self._passed + 1)

    def _go_to_front(self) -> None:
        self.fake_free_list_head = self.front
        self._pass(0)

    def _pass(self, number: int) -> None:
        self._passed = number
        self._next_fence = self.fences[number] if number < len(self.fences) else self._no_fence
        # Age marks are within the last tier.
        self._segment = min(number, len(Tier))

    def _put_back_fences(self, taken: list[KVCacheBlock]) -> list[KVCacheBlock]:
        following = self.fake_free_list_head.next_free_block
        assert following is not None
        blocks = []
        segment = self._segment
        for node in taken:
            if node.block_id >= 0:
                blocks.append(node)
                self._taken[segment] += 1
            else:
                link_before(following, node)
                segment = min(segment + 1, len(Tier))
        num_fences = len(taken) - len(blocks)
        self.num_free_blocks += num_fences
        return blocks + self.popleft_n(num_fences)

    def _renumber(self) -> None:
        self.fences = [self._blank_end, *self._tier_ends, *(mark for mark, _ in self._marks)]
        self._go_to_front()


def count_behind(blocks: list[KVCacheBlock], kept_tokens: int, kept_blocks: int) -> int:
    """How many of ``blocks`` end after ``kept_tokens``.

    Args:
        blocks: in descending order of their ends, not empty.
        kept_tokens: blocks that end at or before it are kept.
        kept_blocks: a guess of the number of kept blocks.
    """
    guess = len(blocks) - kept_blocks
    if (
        0 < guess < len(blocks)
        and end_of(blocks[guess]) <= kept_tokens
        and end_of(blocks[guess - 1]) > kept_tokens
    ):
        return guess
    return bisect_left(blocks, -kept_tokens, key=lambda block: -end_of(block))


def end_of(block: KVCacheBlock) -> int:
    """Tokens of the prefix that ends with a cached block; 0 for a blank one."""
    # Load-bearing: upstream sets it for every cached block of every cache group. The attribute
    # behind the property is read because this runs several times per freed request.
    return block._block_hash_num_tokens or 0


def make_fence() -> KVCacheBlock:
    """A node that stands between blocks in the list of free blocks."""
    return KVCacheBlock(block_id=FENCE_ID)


def link_before(node: KVCacheBlock, fence: KVCacheBlock) -> None:
    """Insert an unlinked fence before ``node``."""
    before = node.prev_free_block
    assert before is not None
    before.next_free_block = fence
    fence.prev_free_block = before
    fence.next_free_block = node
    node.prev_free_block = fence


def unlink(fence: KVCacheBlock) -> None:
    """Remove a fence from the list."""
    before, after = fence.prev_free_block, fence.next_free_block
    assert before is not None
    assert after is not None
    before.next_free_block = after
    after.prev_free_block = before
    fence.prev_free_block = fence.next_free_block = None


def move_before(node: KVCacheBlock, first: KVCacheBlock, last: KVCacheBlock) -> None:
    """Move the consecutive nodes from ``first`` to ``last`` to just before ``node``."""
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
