"""Seats, KV blocks and adapters that running requests hold, take and give back."""

import math
from collections.abc import Sequence
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine.kv_cache.shared_blocks import (
    count_shared,
    drops_last_block,
    full_attention,
    held_tokens,
    is_own,
)
from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.engine.scheduler.waiting_order import first
from meridian_patch.engine.upstream import is_release

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

# At most so many waiting requests are examined: vLLM may skip many of them.
MOST_LOOKED_AT = 16


def lacks_seat(scheduler: "Scheduler") -> bool:
    """Whether as many requests run as may."""
    return num_seated(scheduler) >= num_seats(scheduler)


def num_seats(scheduler: "Scheduler") -> int:
    """Seats of requests and of live probes: all but those that are kept free for more probes."""
    seats = int(scheduler.max_num_active_reqs)
    early_exit = scheduler.early_exit
    kept = early_exit.kept_seats(seats) if early_exit else 0
    return min(seats, seats - kept + early_exit.num_probes) if kept else seats


def num_seated(scheduler: "Scheduler") -> int:
    """Number of requests that count against the limit of running requests."""
    # Load-bearing: a paused session keeps its place in the model runner.
    return int(len(scheduler.running) + scheduler.num_waiting_for_streaming_input)


def takes_seat(scheduler: "Scheduler", tokens_left: int) -> Any | None:
    """The request that upstream would admit into a seat that comes free; None: there is none.

    Load-bearing: upstream admits requests that hold KV blocks before all others, and none while
    running prompts use up the step.

    Args:
        scheduler: upstream's scheduler.
        tokens_left: tokens of the step beside those of decoding requests.
    """
    prompts = [request for request in scheduler.running if request.is_prefill_chunk]
    tokens_left -= sum(request.num_tokens - request.num_computed_tokens for request in prompts)
    holding = first(scheduler.kv_holding_waiting, MOST_LOOKED_AT)
    return None if tokens_left <= 0 or any(map(_is_ready, holding)) else first_ready(scheduler)


def first_ready(scheduler: "Scheduler") -> Any | None:
    """The first waiting request that upstream would not skip if it had a seat.

    Load-bearing: upstream skips one whose grammar is being compiled or failed, whose KV is being
    loaded, whose session is paused, whose tokens from before a preemption are still in flight, or
    whose LoRA adapter finds all slots in use.
    """
    if scheduler._pause_state != PauseState.UNPAUSED:
        return None
    waiting = first(scheduler.waiting, MOST_LOOKED_AT)
    lora = scheduler.lora_config
    adapters = {_adapter(request) for request in scheduler.running} - {0} if lora else set()
    for request in filter(_is_ready, waiting):
        adapter = _adapter(request)
        if not lora or not adapter or adapter in adapters or len(adapters) < lora.max_loras:
            return request
    return None


def miscounts_adapters(scheduler: "Scheduler") -> bool:
    """Whether upstream may admit a LoRA adapter for which it has no slot.

    Load-bearing: vLLM 0.32 counts only the adapters of the requests in the step. If it admitted
    another one beside a running request that is left out of the step, the running requests could
    have more adapters than slots, and an assertion would fail.
    """
    if not scheduler.lora_config or is_release("0.33"):
        return False
    adapters = {0}
    for request in scheduler.requests.values():
        adapters.add(_adapter(request))
        if len(adapters) - 1 > scheduler.lora_config.max_loras:
            return True
    return False


def may_skip_adapter(
    scheduler: "Scheduler", chunks: Sequence[Any], decode_tokens: int, budget: int
) -> bool:
    """Whether a lowered budget may leave a running request with a LoRA adapter out of the step.

    No request must be admitted then (see ``miscounts_adapters``).

    Args:
        scheduler: upstream's scheduler.
        chunks: prompts in progress, and probes.
        decode_tokens: tokens of the running requests that decode.
        budget: tokens of the step.
    """
    if not any(_adapter(request) for request in chunks):
        return False
    most = scheduler.scheduler_config.long_prefill_token_threshold
    if not most or scheduler.adaptive_long_prefill_threshold:
        # Load-bearing: the second one raises the threshold where few requests run.
        most = math.inf
    left = (request.num_tokens - request.num_computed_tokens for request in chunks)
    wanted = decode_tokens + sum(min(tokens, most) for tokens in left)
    return wanted > budget and miscounts_adapters(scheduler)


def num_steps_until_admitted(scheduler: "Scheduler") -> int:
    """Steps to be scheduled before a request takes the room that a preemption makes now.

    Mostly 0. With a connector it is at least 1, as room is used in the step after a preemption.

    Load-bearing: a connector may fill blocks while a step still writes them. With batches in
    flight, upstream frees them when the steps scheduled before the preemption have ended. While so
    many batches as may be are in flight, one ends per step that is scheduled; before, none does.
    """
    waits = int(scheduler.connector is not None)
    is_late = scheduler.defer_block_free and scheduler.sched_step_seq > scheduler.processed_step_seq
    return max(int(scheduler.vllm_config.max_concurrent_batches - 1) if is_late else 0, waits)


def taken_blocks(
    scheduler: "Scheduler", token_budget: int | None = None, num_later: int = 0
) -> int:
    """Upper bound of the free KV blocks that the running requests take in a step.

    Load-bearing: running requests get their blocks before waiting requests are considered, and none
    is admitted in a step in which one lacks blocks.

    Args:
        scheduler: upstream's scheduler.
        token_budget: tokens that the step may compute; None: the engine's own limit.
        num_later: how many further steps count too.
    """
    steps = 1 + num_later
    ahead = steps * int(1 + scheduler.num_spec_tokens) + int(scheduler.num_lookahead_tokens)
    most = int(scheduler.max_num_scheduled_tokens)
    most = steps * (most if token_budget is None else min(most, token_budget))
    prompts = [request for request in scheduler.running if request.is_prefill_chunk]
    rest = sum(request.num_tokens - request.num_computed_tokens for request in prompts)
    taken = 0
    for group in scheduler.kv_cache_manager.coordinator.single_type_managers:
        size, held = group.block_size, group.req_to_blocks
        for request in scheduler.running:
            if not request.is_prefill_chunk:
                blocks = -(-(request.num_computed_tokens + ahead) // size)
                taken += max(blocks - len(held.get(request.request_id, ())), 0)
        # Each chunk may end in a block of its own, and decode after it.
        taken += -(-min(rest, most) // size) + len(prompts) * (1 + -(-ahead // size))
    return taken


def whole_blocks(scheduler: "Scheduler", request: Request) -> int:
    """Upper bound of the free KV blocks with which upstream admits a waiting request."""
    manager = scheduler.kv_cache_manager
    tokens = int(min(request.num_tokens + scheduler.num_lookahead_tokens, scheduler.max_model_len))
    held = 0
    if manager.prefix_cache_lookup_enabled(request):
        held = held_tokens(manager, request, request.num_tokens)
    full = list(full_attention(manager))
    if held and drops_last_block(manager):
        held = max(held - max(group.block_size for group in full), 0)
    # Load-bearing: this call has no side effect, and caps what a sliding window or a recurrent
    # state holds, as upstream's own admission check does.
    whole = manager.coordinator.get_num_blocks_to_allocate(
        request_id=request.request_id,
        num_tokens=tokens,
        new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
        num_encoder_tokens=0,
        total_computed_tokens=0,
        num_local_computed_tokens=0,
        num_tokens_main_model=tokens,
        apply_admission_cap=True,
    )
    shared = sum(held // group.block_size for group in full)
    return int(whole - shared + (manager.watermark_blocks if scheduler.running else 0))


def freed_blocks(manager: Any, name: str, prefix: Sequence[Sequence[Any]] = ()) -> int:
    """KV blocks that a preemption of a running request would free for a newcomer.

    Blocks of the newcomer's prefix that only this request holds do not count: while they are held
    the newcomer shares them, and once they are free it takes them from the free blocks.

    Args:
        manager: upstream's KV cache manager.
        name: id of the running request.
        prefix: cached blocks of the newcomer's prefix, by cache group.
    """
    groups = manager.coordinator.single_type_managers
    freed = 0
    for group, held, cached in zip_longest(groups, manager.get_blocks(name).blocks, prefix):
        # With a window, another request may be further on and have freed blocks before the shared
        # ones, so shared blocks need not come first, and each block is checked.
        is_full = isinstance(group.kv_cache_spec, FullAttentionSpec)
        freed += len(held) - count_shared(held) if is_full else sum(map(is_own, held))
        common = takewhile(lambda pair: pair[0] is pair[1], zip(held, cached or (), strict=False))
        freed -= sum(is_own(block) for block, _ in common)
    return freed


def _is_ready(request: Request) -> bool:
    if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        grammar = request.structured_output_request and request.structured_output_request.grammar
        return grammar is not None and not isinstance(grammar, Exception)
    if request.status not in {RequestStatus.WAITING, RequestStatus.PREEMPTED}:
        return False
    is_stale = request.num_stale_output_tokens and not request.drop_stale_output
    return not is_stale and not isinstance(request, ProbeRequest)


def _adapter(request: Request) -> int:
    return request.lora_request.lora_int_id if request.lora_request else 0
