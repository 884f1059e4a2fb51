"""Finds the waiting request that upstream admits next, and counts the KV blocks that it lacks.

vLLM's ``schedule()`` skips a waiting request, or stops at it, for the reasons listed in
``next_in_line``. A running request is preempted for a newcomer only if blocks are all it lacks.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from meridian_patch.engine.early_exit.probe_request import ProbeRequest
from meridian_patch.engine.kv_cache.shared_blocks import count_shared, is_own
from meridian_patch.engine.scheduler.waiting_order import first

# At most so many waiting requests are examined: vLLM may skip many of them.
_MOST_LOOKED_AT = 16


class NextStep(NamedTuple):
    """What is known of a step before it is scheduled.

    Attributes:
        token_budget: tokens that the step may compute; None: the engine's own limit.
        decode_tokens: part of the budget that decoding requests take, drafts included; None: one
            per running request that is not computing its prompt.
        least_chunk: fewest prompt tokens that upstream schedules at once, unless fewer are left.
        context_tokens: KV tokens that the running requests hold.
    """

    token_budget: int | None = None
    decode_tokens: int | None = None
    least_chunk: int = 1
    context_tokens: int = 0


def next_in_line(
    scheduler: Any,
    step: NextStep | None = None,
    without: Collection[str] = (),
    free_seats: int = 0,
) -> Any | None:
    """The first waiting request that lacks nothing, or nothing but blocks and so many seats.

    Args:
        scheduler: upstream's scheduler.
        step: what is known of the next step.
        without: ids of running requests to treat as preempted; their LoRA adapters are free then.
        free_seats: number of seats to treat as free although requests hold them.

    Load-bearing: these are the reasons for which ``schedule()`` does not admit a request.

    1. The scheduler is paused.
    2. The number of running requests is at its limit; paused sessions count.
    3. The running requests use up the step's tokens.
    4. Another waiting request that already holds blocks is ready, and goes first.
    5. Its grammar is being compiled or failed, its KV is being loaded, or its session is paused.
    6. Tokens that it sampled before a preemption are still in flight.
    7. Its LoRA adapter is not loaded, and all adapter slots are in use.
    8. Chunked prefill is off, and its prompt is longer than what is left of the step.
    9. It lacks blocks.

    Two reasons are not checked, because asking would change state: whether a KV connector or an
    encoder connector knows its answer yet (see ``Refusals``), and whether prefill is delayed for
    data-parallel balance.
    """
    is_full = num_seated(scheduler) - free_seats >= scheduler.max_num_active_reqs
    if scheduler._pause_state != PauseState.UNPAUSED or is_full:
        return None
    step = step or NextStep()
    left = _prefill_tokens(scheduler, step) - sum(_chunks(scheduler).values())
    if left <= 0 or any(
        _is_ready(scheduler, one) for one in first(scheduler.kv_holding_waiting, _MOST_LOOKED_AT)
    ):
        return None
    adapters = _adapters(scheduler, without) if scheduler.lora_config else None
    for request in first(scheduler.waiting, _MOST_LOOKED_AT):
        if not _is_ready(scheduler, request) or not _has_adapter(scheduler, request, adapters):
            continue
        is_chunked = scheduler.scheduler_config.enable_chunked_prefill
        least = min(step.least_chunk, request.num_tokens) if is_chunked else request.num_tokens
        return request if least <= left else None
    return None


def num_seated(scheduler: Any) -> int:
    """Number of requests that count against the limit of running requests."""
    # Load-bearing: a paused session keeps its place in the model runner.
    return int(len(scheduler.running) + scheduler.num_waiting_for_streaming_input)


def needed_blocks(scheduler: Any, request: Any) -> int:
    """Free KV blocks that ``schedule()`` requires for a waiting request before it admits it.

    A prefix cache hit also uses up a free block, unless a running request holds that block. So
    only held blocks are subtracted. They are counted by bisection, because a request that holds a
    block of a prefix holds all blocks before it.
    """
    manager = scheduler.kv_cache_manager
    tokens = _gated_tokens(scheduler, request)
    watermark = manager.watermark_blocks if scheduler.running else 0
    found = _recurrent_hit(manager, request)
    # Load-bearing: upstream admits no request on a recurrent state that is computed in the same
    # step, and asks for more blocks than there are for one on a state of the step before. A prompt
    # in progress computes the next such state.
    hit, hit_tokens = found or (manager.empty_kv_cache_blocks.blocks, 0)
    # Load-bearing: this call has no side effect, and caps what a sliding window holds, as
    # upstream's own admission check does.
    whole = manager.coordinator.get_num_blocks_to_allocate(
        request_id=request.request_id,
        num_tokens=tokens,
        new_computed_blocks=hit,
        num_encoder_tokens=0,
        total_computed_tokens=hit_tokens,
        num_local_computed_tokens=hit_tokens,
        num_tokens_main_model=tokens,
        apply_admission_cap=True,
    )
    # The number above already leaves out held blocks of a recurrent hit.
    held = 0 if found else _num_held_hits(manager, request, tokens)
    return int(whole + watermark - held)


def num_steps_until_admitted(scheduler: Any) -> int:
    """Steps to be scheduled before a request takes the room that a preemption makes now.

    Mostly 0. With a connector it is at least 1, as room is used in the step after a preemption.

    Load-bearing: a connector may fill blocks while a step still writes them. With batches in
    flight, upstream frees them when the steps scheduled before the preemption have ended. While so
    many batches as may be are in flight, one ends per step that is scheduled; before, none does.
    """
    waits = int(scheduler.connector is not None)
    is_late = scheduler.defer_block_free and scheduler.sched_step_seq > scheduler.processed_step_seq
    return max(int(scheduler.vllm_config.max_concurrent_batches - 1) if is_late else 0, waits)


def taken_blocks(scheduler: Any, step: NextStep, num_later: int = 0) -> int:
    """Upper bound of the free KV blocks that the running requests take in a step.

    Load-bearing: running requests get their blocks before waiting requests are considered, and none
    is admitted in a step in which one lacks blocks.

    Args:
        scheduler: upstream's scheduler.
        step: what is known of the step.
        num_later: how many further steps count too.
    """
    steps = 1 + num_later
    ahead = steps * int(1 + scheduler.num_spec_tokens) + int(scheduler.num_lookahead_tokens)
    chunks = _chunks(scheduler)
    prefill = min(sum(chunks.values()), max(_prefill_tokens(scheduler, step), 0)) * steps
    decoding = [request for request in scheduler.running if not request.is_prefill_chunk]
    taken = 0
    for group in scheduler.kv_cache_manager.coordinator.single_type_managers:
        size, held = group.block_size, group.req_to_blocks
        for request in decoding:
            blocks = (request.num_computed_tokens + ahead + size - 1) // size
            taken += max(blocks - len(held.get(request.request_id, ())), 0)
        # Each chunk may end in a block of its own, and decode after it.
        taken += -(-prefill // size) + len(chunks) * (1 + -(-ahead // size))
    return taken


def freed_blocks(scheduler: Any, request: Any, newcomer: Any) -> int:
    """KV blocks that a preemption of a running request would free for a newcomer.

    Blocks of the newcomer's prefix that only this request holds do not count: while they are held
    the newcomer shares them, and once they are free it takes them from the free blocks.
    """
    manager = scheduler.kv_cache_manager
    name = request.request_id
    blocks = manager.get_blocks(name).blocks
    groups = manager.coordinator.single_type_managers
    freed = sum(map(_num_own, groups, blocks))
    found = _recurrent_hit(manager, newcomer) if freed else None
    if found is not None:
        ids = {block.block_id for held in blocks for block in held}
        return freed - sum(is_own(one) and one.block_id in ids for one in chain(*found[0]))
    hit = _hit_tokens(manager, newcomer, _gated_tokens(scheduler, newcomer)) if freed else 0
    if not hit:
        return freed
    for group in _full_attention(manager):
        own = group.req_to_blocks[name]
        # By bisection: both requests have the same blocks up to some index, and blocks that a third
        # request also holds come before those that it does not hold.
        most = min(hit // group.block_size, len(own))
        common = bisect_left(
            range(most), True, key=lambda at: _cached(group, newcomer, at) is not own[at]
        )
        freed -= common - bisect_left(range(common), True, key=lambda at: own[at].ref_cnt == 1)
    return freed


def _num_own(group: Any, held: Sequence[Any]) -> int:
    """Number of blocks of one cache group that only this request holds."""
    spec = group.kv_cache_spec
    if isinstance(spec, FullAttentionSpec):
        return len(held) - count_shared(held)
    # With a window, another request may be further on and have freed blocks before the shared ones,
    # so shared blocks need not come first, and each block is checked.
    if isinstance(spec, SlidingWindowSpec):
        # Load-bearing: null blocks replace freed ones, and stand at the front.
        held = list(takewhile(lambda block: not block.is_null, reversed(held)))
    return sum(map(is_own, held))


def _gated_tokens(scheduler: Any, request: Any) -> int:
    """Tokens of a waiting request for which blocks must be free before it is admitted."""
    tokens = request.num_tokens
    if not scheduler.scheduler_reserve_full_isl:
        tokens = min(tokens, scheduler.max_num_scheduled_tokens)
    # Load-bearing: the last chunk of a prompt also needs slots for the drafts that follow it.
    return int(min(tokens + scheduler.num_lookahead_tokens, scheduler.max_model_len))


def _prefill_tokens(scheduler: Any, step: NextStep) -> int:
    """Tokens of a step that are left after those of decoding requests."""
    budget, decodes = scheduler.max_num_scheduled_tokens, step.decode_tokens
    if step.token_budget is not None:
        budget = min(budget, step.token_budget)
    if decodes is None:
        decodes = len(scheduler.running) - len(_chunks(scheduler))
    return int(budget - decodes)


def _chunks(scheduler: Any) -> dict[str, int]:
    """Upper bound of the prompt tokens that each running request computes in one step, by id."""
    # Load-bearing: a chunk is no longer than this, unless there is no other request.
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    longest = threshold if threshold > 0 else math.inf
    if threshold > 0 and scheduler.adaptive_long_prefill_threshold:
        # Load-bearing: upstream raises the bound to an equal share for each request.
        share = scheduler.scheduler_config.max_num_batched_tokens
        longest = max(threshold, share // max(sum(scheduler.get_request_counts()), 1))
    return {
        request.request_id: min(request.num_tokens - request.num_computed_tokens, longest)
        for request in scheduler._inflight_prefills
        if request.status == RequestStatus.RUNNING
    }


def _is_ready(scheduler: Any, request: Any) -> bool:
    status = request.status
    if status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        grammar = request.structured_output_request and request.structured_output_request.grammar
        return grammar is not None and not isinstance(grammar, Exception)
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    if status == RequestStatus.WAITING_FOR_STREAMING_REQ or isinstance(request, ProbeRequest):
        return False
    return not request.num_stale_output_tokens or request.drop_stale_output


def _adapters(scheduler: Any, without: Collection[str]) -> set[int]:
    """Ids of the LoRA adapters that running requests use, without the requests ``without``."""
    return {
        request.lora_request.lora_int_id
        for request in scheduler.running
        if request.lora_request and request.request_id not in without
    }


def _has_adapter(scheduler: Any, request: Any, adapters: set[int] | None) -> bool:
    if adapters is None or request.lora_request is None:
        return True
    is_loaded = request.lora_request.lora_int_id in adapters
    return is_loaded or len(adapters) < scheduler.lora_config.max_loras


def _recurrent_hit(manager: Any, request: Any) -> tuple[tuple[list[Any], ...], int] | None:
    """Cached blocks by group, and tokens, of a request's prefix in a model with a recurrent state.

    None for other models, and for requests that skip the prefix cache. The look-up has no side
    effect, and is short because blocks of these models are large.
    """
    groups = manager.coordinator.single_type_managers
    is_recurrent = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    if not is_recurrent or not manager.prefix_cache_lookup_enabled(request):
        return None
    blocks, tokens, _ = manager.coordinator.find_longest_cache_hit(
        request.block_hashes, request.num_tokens - 1
    )
    return blocks, tokens


def _num_held_hits(manager: Any, request: Any, tokens: int) -> int:
    """Number of the request's prefix cache hits that running requests hold."""
    hit = _hit_tokens(manager, request, tokens)
    return sum(hit // group.block_size for group in _full_attention(manager)) if hit else 0


def _hit_tokens(manager: Any, request: Any, tokens: int) -> int:
    """Tokens of the request's prefix cache hit whose blocks running requests hold."""
    # Load-bearing: a request that asks for prompt log-probabilities skips the prefix cache. For
    # others, the last known token is always computed.
    if not manager.prefix_cache_lookup_enabled(request):
        return 0
    tokens = min(tokens, request.num_tokens)
    held = held_tokens(manager, request, tokens)
    if not held or not manager.coordinator.eagle_group_ids:
        return held
    # Load-bearing: where EAGLE drafts, the last block of a hit is computed again.
    ends = (
        group.block_size
        for group in _full_attention(manager)
        if (place := held // group.block_size) >= (tokens - 1) // group.block_size
        or _cached(group, request, place) is None
    )
    return held - max(ends, default=0)


def held_tokens(manager: Any, request: Any, tokens: int) -> int:
    """Tokens of the request's prefix that are in the cache and that running requests hold.

    The same tokens may be cached twice, with only one copy held. Load-bearing: a look-up finds the
    copy that was cached first.
    """
    full = list(_full_attention(manager))
    # A hit is as long as the shortest one among the groups. Groups without full attention may have
    # a shorter one, so nothing is counted unless they have the blocks at the end of the prefix.
    common = min((_held_prefix(group, request, tokens - 1) for group in full), default=0)
    groups = manager.coordinator.single_type_managers
    if any(not _has_end(group, request, common) for group in groups if group not in full):
        return 0
    return common


def _full_attention(manager: Any) -> Iterator[Any]:
    for group in manager.coordinator.single_type_managers:
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            yield group


def _held_prefix(group: Any, request: Any, most_tokens: int) -> int:
    """Tokens of the request's prefix whose blocks in this group are cached and held."""
    most = most_tokens // group.block_size
    return group.block_size * bisect_left(
        range(most), True, key=lambda index: not _is_held(group, request, index)
    )


def _is_held(group: Any, request: Any, index: int) -> bool:
    block = _cached(group, request, index)
    return block is not None and block.ref_cnt > 0


def _has_end(group: Any, request: Any, tokens: int) -> bool:
    """Whether a group that does not keep every block has the blocks to continue at ``tokens``."""
    spec = group.kv_cache_spec
    if not isinstance(spec, SlidingWindowSpec):
        return False
    end = tokens // group.block_size
    start = max(0, end - -(-(spec.sliding_window - 1) // group.block_size))
    return all(_cached(group, request, index) is not None for index in range(start, end))


def _cached(group: Any, request: Any, index: int) -> Any | None:
    """The group's cached block at an index of the request's prefix."""
    pool = group.block_pool
    # Load-bearing: each hash covers the whole prefix up to its own block.
    place = (index + 1) * group.block_size // pool.hash_block_size - 1
    if place >= len(request.block_hashes):
        return None
    found = pool.get_cached_block(request.block_hashes[place], [group.kv_cache_group_id])
    return found[0] if found else None
