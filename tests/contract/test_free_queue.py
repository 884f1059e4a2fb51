"""The tiered queue of free blocks against vLLM's own, and against plain lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from queue_watch import give_hash, link_faults, walk_tiers
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from meridian_patch.engine.kv_cache.free_queue import AGE_PARTS, TieredFreeQueue
from meridian_patch.policy.retention import Retention, Tier

NUM_BLOCKS = 24
MIN_OPERATIONS = 5000
RETAIN_S = 10.0
# Does not divide RETAIN_S into equal parts: calls never come exactly in time.
TICK_S = 0.4
PROFILE = settings(
    max_examples=150, stateful_step_count=90, deadline=None, database=None, derandomize=True
)

COUNT = st.integers(1, 9)
SEED = st.randoms(use_true_random=False)


def sample(random, items, count):
    """Up to ``count`` of ``items``, in a random order."""
    return random.sample(items, min(count, len(items)))


class StockOrder(RuleBasedStateMachine):
    """Without a retention both queues hand out the same ids."""

    operations = 0

    def __init__(self):
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(NUM_BLOCKS)]
        self.stock_blocks = [KVCacheBlock(i) for i in range(NUM_BLOCKS)]
        self.queue = TieredFreeQueue(self.blocks, RETAIN_S)
        self.stock = FreeKVCacheBlockQueue(self.stock_blocks)
        self.used = []
        self.now = 0.0

    def each(self):
        type(self).operations += 1
        return (self.queue, self.blocks), (self.stock, self.stock_blocks)

    def same(self, results):
        ours, stocks = results
        assert ours == stocks
        self.used += ours

    @precondition(lambda self: self.stock.num_free_blocks)
    @rule()
    def popleft(self):
        self.same([[queue.popleft().block_id] for queue, _ in self.each()])

    @rule(count=st.integers(0, 9))
    def popleft_n(self, count):
        n = min(count, self.stock.num_free_blocks)
        self.same([[block.block_id for block in queue.popleft_n(n)] for queue, _ in self.each()])

    @precondition(lambda self: not self.stock.num_free_blocks)
    @rule()
    def popleft_of_an_empty_queue(self):
        for queue, _ in self.each():
            with pytest.raises(ValueError, match="No free blocks"):
                queue.popleft()

    @precondition(lambda self: self.used)
    @rule(random=SEED)
    def append(self, random):
        (block_id,) = self.leave(sample(random, self.used, 1))
        for queue, blocks in self.each():
            queue.append(blocks[block_id])

    @rule(random=SEED, count=COUNT)
    def append_n(self, random, count):
        ids = self.leave(sample(random, self.used, count))
        for queue, blocks in self.each():
            queue.append_n([blocks[i] for i in ids])

    @rule(random=SEED, count=COUNT)
    def prepend_n(self, random, count):
        ids = self.leave(sample(random, self.used, count))
        for queue, blocks in self.each():
            queue.prepend_n([blocks[i] for i in ids])

    @precondition(lambda self: self.stock.num_free_blocks)
    @rule(random=SEED)
    def remove(self, random):
        block_id = random.choice(self.stock.get_all_free_blocks()).block_id
        for queue, blocks in self.each():
            queue.remove(blocks[block_id])
        self.used.append(block_id)

    @rule(seconds=st.floats(0, 2 * RETAIN_S))
    def advance(self, seconds):
        self.now += seconds
        self.queue.advance(self.now)

    @rule()
    def blank_all(self):
        self.queue.blank_all()

    @invariant()
    def same_order(self):
        expected = [block.block_id for block in self.stock.get_all_free_blocks()]
        assert [block.block_id for block in self.queue.get_all_free_blocks()] == expected
        assert [block.block_id for block in self.queue.iter_blocks_after(None)] == expected
        assert self.queue.num_free_blocks == self.stock.num_free_blocks
        assert not list(link_faults(self.queue))

    def leave(self, ids):
        self.used = [i for i in self.used if i not in ids]
        return ids


def test_hands_out_what_stock_hands_out():
    """Over at least 5 000 random operations on both queues."""
    StockOrder.operations = 0
    run_state_machine_as_test(StockOrder, settings=PROFILE)
    assert StockOrder.operations >= MIN_OPERATIONS


class TieredOrder(RuleBasedStateMachine):
    """Tiers as plain lists of ids, in the order of eviction."""

    operations = decayed = crossings = 0

    def __init__(self):
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(NUM_BLOCKS)]
        self.queue = TieredFreeQueue(list(self.blocks), RETAIN_S)
        # Blank ones, then by tier.
        self.tiers = [list(range(NUM_BLOCKS)), [], [], []]
        self.used = []
        self.assigned = {}
        self.ends = {}
        self.freed_at = {}
        self.evicted = dict.fromkeys(Tier, 0)
        self.now = 0.0

    @initialize()
    def start(self):
        self.queue.advance(self.now)

    @property
    def order(self):
        return [block_id for tier in self.tiers for block_id in tier]

    def take(self, ids):
        """The model's side of handing out the first ``ids``."""
        type(self).operations += 1
        type(self).crossings += len({self.tier(i) for i in ids}) > 1
        for block_id in ids:
            tier = self.tier(block_id)
            self.tiers[tier].remove(block_id)
            if tier:
                self.evicted[Tier(tier - 1)] += 1
            self.blocks[block_id].reset_hash()
            self.ends.pop(block_id, None)
            self.used.append(block_id)

    def tier(self, block_id):
        return next(n for n, members in enumerate(self.tiers) if block_id in members)

    @precondition(lambda self: self.order)
    @rule()
    def popleft(self):
        expected = self.order[0]
        assert self.queue.popleft().block_id == expected
        self.take([expected])

    @rule(count=st.integers(0, 16))
    def popleft_n(self, count):
        expected = self.order[:count]
        taken = self.queue.popleft_n(len(expected))
        assert [block.block_id for block in taken] == expected
        assert all(block.next_free_block is block.prev_free_block is None for block in taken)
        self.take(expected)

    @rule(
        random=SEED,
        count=COUNT,
        kept=st.integers(0, 100),
        tier=st.sampled_from([None, *Tier]),
        guess=st.integers(-2, 12),
    )
    def append_n(self, random, count, kept, tier, guess):
        type(self).operations += 1
        ids = sample(random, self.used, count)
        self.used = [i for i in self.used if i not in ids]
        # A block that was hit comes back with the end it had.
        for block_id in ids:
            self.ends.setdefault(block_id, random.randrange(1, 100))
            give_hash(self.blocks[block_id], self.ends[block_id])
        ids.sort(key=lambda i: -self.ends[i])
        for block_id in ids:
            self.freed_at[block_id] = self.now
            given = self.assigned.pop(block_id, None)
            if tier is not None:
                low = max(tier, given or 0) if self.ends[block_id] > kept else Tier.OUTPUT_CRITICAL
            else:
                low = Tier.OUTPUT_CRITICAL if given is None else given
            self.tiers[low + 1].append(block_id)
        self.queue.retention = None if tier is None else Retention(kept, tier)
        # A wrong guess must change nothing.
        self.queue.kept_blocks = guess
        if len(ids) == 1:
            self.queue.append(self.blocks[ids[0]])
        else:
            self.queue.append_n([self.blocks[i] for i in ids])
        self.queue.retention = None

    @rule(random=SEED, count=COUNT)
    def prepend_n(self, random, count):
        type(self).operations += 1
        ids = sample(random, self.used, count)
        self.used = [i for i in self.used if i not in ids]
        for block_id in ids:
            self.blocks[block_id].reset_hash()
            self.ends.pop(block_id, None)
            self.assigned.pop(block_id, None)
        self.queue.prepend_n([self.blocks[i] for i in ids])
        self.tiers[0] = ids + self.tiers[0]

    @precondition(lambda self: self.order)
    @rule(random=SEED, count=COUNT)
    def remove(self, random, count):
        type(self).operations += 1
        for block_id in sample(random, self.order, count):
            self.queue.remove(self.blocks[block_id])
            self.tiers[self.tier(block_id)].remove(block_id)
            self.used.append(block_id)

    @precondition(lambda self: self.used)
    @rule(random=SEED, tier=st.sampled_from(Tier))
    def assign(self, random, tier):
        type(self).operations += 1
        block_id = random.choice(self.used)
        self.assigned[block_id] = self.queue.assigned[block_id] = tier

    @rule(ticks=st.integers(1, int(RETAIN_S / TICK_S)))
    def advance(self, ticks):
        type(self).operations += 1
        for _ in range(ticks):
            self.now += TICK_S
            self.queue.advance(self.now)
            self.follow_decay()

    def follow_decay(self):
        """Which blocks are OUTPUT_CRITICAL no more, and whether it was time."""
        critical = self.tiers[1 + Tier.OUTPUT_CRITICAL]
        standing = walk_tiers(self.queue)[1 + Tier.OUTPUT_CRITICAL]
        number = len(critical) - len(standing)
        decayed = critical[:number]
        assert standing == critical[number:]
        type(self).decayed += number
        assert all(self.now - self.freed_at[i] >= RETAIN_S for i in decayed)
        latest = RETAIN_S * (1 + 1 / AGE_PARTS) + 2 * TICK_S
        assert all(self.now - self.freed_at[i] < latest for i in standing)
        self.tiers[1 + Tier.THINK_ACTIVE] += decayed
        del critical[:number]

    @precondition(lambda self: not self.used)
    @rule()
    def blank_all(self):
        type(self).operations += 1
        for block in self.blocks:
            block.reset_hash()
        self.ends.clear()
        self.assigned.clear()
        self.queue.blank_all()
        self.tiers = [self.order, [], [], []]

    @rule()
    def drain_evictions(self):
        type(self).operations += 1
        expected = {tier: number for tier, number in self.evicted.items() if number}
        assert self.queue.drain_evictions() == expected
        self.evicted = dict.fromkeys(Tier, 0)

    @precondition(lambda self: self.order)
    @rule(random=SEED)
    def iterate_from_a_block(self, random):
        type(self).operations += 1
        index = random.randrange(len(self.order))
        cursor = self.blocks[self.order[index]]
        behind = [block.block_id for block in self.queue.iter_blocks_after(cursor)]
        # A KV tier is given no finished thoughts, but from among them on.
        finished = self.tiers[1 + Tier.THINK_COMPLETE] if index < len(self.tiers[0]) else ()
        assert behind == [other for other in self.order[index + 1 :] if other not in finished]

    @invariant()
    def in_order(self):
        assert walk_tiers(self.queue) == self.tiers
        assert not list(link_faults(self.queue))
        assert [block.block_id for block in self.queue.get_all_free_blocks()] == self.order
        finished = self.tiers[1 + Tier.THINK_COMPLETE]
        given = [block.block_id for block in self.queue.iter_blocks_after(None)]
        assert given == [other for other in self.order if other not in finished]
        assert self.queue.num_free_blocks == len(self.order)
        assert self.queue.assigned == self.assigned


def test_tiers_are_those_of_plain_lists():
    """Over at least 5 000 random operations, with fences crossed and blocks decayed."""
    TieredOrder.operations = TieredOrder.decayed = TieredOrder.crossings = 0
    run_state_machine_as_test(TieredOrder, settings=PROFILE)
    assert TieredOrder.operations >= MIN_OPERATIONS
    assert TieredOrder.decayed > 100, "the model must see decay"
    assert TieredOrder.crossings > 50, "the model must see fences crossed in one call"


def freed(queue, block, tier, end=10):
    """Free one block under a retention that keeps nothing."""
    give_hash(block, end)
    queue.retention = Retention(0, tier)
    queue.append_n([block])
    queue.retention = None


def test_a_block_tells_its_tier_as_long_as_it_holds_the_same():
    """The first block behind the kept tokens carries the tier of all behind it."""
    blocks = [KVCacheBlock(i) for i in range(4)]
    queue = TieredFreeQueue(blocks, RETAIN_S)
    for block, end in zip(queue.popleft_n(4), (40, 30, 20, 10), strict=True):
        give_hash(block, end)
    queue.retention = Retention(10, Tier.THINK_ACTIVE)
    queue.append_n(blocks)
    assert queue.tier_from(blocks[2]) is Tier.THINK_ACTIVE
    assert queue.tier_from(blocks[3]) is Tier.OUTPUT_CRITICAL
    queue.remove(blocks[2])
    assert queue.tier_from(blocks[2]) is Tier.THINK_ACTIVE
    give_hash(blocks[2], 99)
    assert queue.tier_from(blocks[2]) is Tier.OUTPUT_CRITICAL
    freed(queue, blocks[2], Tier.THINK_COMPLETE)
    assert queue.tier_from(blocks[2]) is Tier.THINK_COMPLETE
    queue.blank_all()
    assert queue.tier_from(blocks[2]) is Tier.OUTPUT_CRITICAL


def test_many_idle_periods_need_no_more_fences():
    """A clock that jumps, and one that stands, leave all fences in the list."""
    queue = TieredFreeQueue([KVCacheBlock(i) for i in range(3)], RETAIN_S)
    now = 0.0
    for seconds in [0.0, RETAIN_S * 100, 0.0, *[RETAIN_S / AGE_PARTS] * 50, 1e-9] * 3:
        now += seconds
        queue.advance(now)
        assert 0 < len(queue.fences) - len(Tier) <= AGE_PARTS + 1
        assert not list(link_faults(queue))
