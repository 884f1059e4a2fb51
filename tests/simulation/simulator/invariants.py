"""What must hold of a scheduler after every step, whatever the configuration."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from leaks import find_leaks
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.request import RequestStatus

from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.phase.tracker import Phase
from meridian_patch.telemetry import counters
from simulator.build import AGING_S
from simulator.engine import Arm
from simulator.failure import Failure

# Of stock's mean time to the first answer token on the same seed, and so many steps of mean length
# more: where few requests come, one that makes room is all of the mean.
MOST_OF_STOCK, MORE_STEPS = 1.5, 40
# Of a single request: it may have made room for others, and aged in the queue.
MOST_OF_ITS_OWN, PATIENCE_AGINGS = 4, 20
# Faults that come so many times per iteration, of which each arm has its own number, or that no
# hook of stock's has.
_UNEQUAL = ("abort", "reset", "pause", "sleep", "late", "raises", "load_failure")
# The blocks are all looked at in one step of so many, where there are more than so many.
_LARGE_POOL, _EVERY = 64, 8


def check_places(arm: Arm) -> None:
    """Invariant 1: each request is in one place, and the counts are those of the requests."""
    scheduler = arm.scheduler
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    holding = list(scheduler.kv_holding_waiting)
    queued = [*running, *waiting, *holding]
    users = [r for r in queued if r.request_id in arm.ledger.records]
    if len(set(queued)) != len(queued):
        raise Failure("place", "a request stands in two queues, or twice in one")
    for request in queued:
        if scheduler.requests.get(request.request_id) is not request:
            raise Failure("place", f"{request.request_id} is queued and not known")
        if request.is_finished():
            raise Failure("place", f"{request.request_id} is queued and finished")
    for request in running:
        if request.status != RequestStatus.RUNNING:
            raise Failure("place", f"{request.request_id} runs and is {request.status!s}")
    live = {record.ask.name for record in arm.live()}
    places = {request.request_id for request in users}
    if live != places:
        lost, extra = sorted(live - places)[:3], sorted(places - live)[:3]
        raise Failure("place", f"lost: {lost}; queued though they ended: {extra}")


def check_counts(arm: Arm) -> None:
    """Invariant 1: what is told of the requests is so, and never negative."""
    scheduler = arm.scheduler
    running = list(scheduler.running)
    waiting = [*scheduler.waiting, *scheduler.kv_holding_waiting]
    truth = tuple(
        sum(not isinstance(request, ProbeRequest) for request in each)
        for each in (running, waiting)
    )
    counts = scheduler.get_request_counts()
    if counts != truth:
        raise Failure("counts", f"get_request_counts() is {counts}, in truth {truth}")
    if min(counts) < 0 or scheduler.get_num_unfinished_requests() < 0:
        raise Failure("counts", f"a negative count among {counts}")


def check_blocks(arm: Arm) -> None:
    """Invariant 2: every block is free, cached or held, and counted right."""
    scheduler = arm.scheduler
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    if len(pool.blocks) > _LARGE_POOL and arm.num_steps % _EVERY and not arm.is_drained:
        return
    if getattr(manager, "queues", ()):
        faults = find_faults(pool)
        if faults:
            raise Failure("blocks", "; ".join(faults[:3]))
    if arm.case.connector == "offload" or arm.case.cache == "hybrid":
        # Transfers, and copies of states, hold blocks of their own.
        return
    holders = Counter(block.block_id for block in _held(arm))
    for block in pool.blocks:
        if not block.is_null and block.ref_cnt != holders[block.block_id]:
            raise Failure(
                "blocks",
                f"block {block.block_id} counts {block.ref_cnt} holders, it has "
                f"{holders[block.block_id]}",
            )


def _held(arm: Arm) -> Iterator[Any]:
    """Every block once for each that holds it."""
    for each in arm.scheduler.kv_cache_manager.coordinator.single_type_managers:
        for blocks in each.req_to_blocks.values():
            yield from (block for block in blocks if not block.is_null)
    for _, blocks in arm.scheduler.deferred_frees:
        yield from (block for block in blocks if not block.is_null)


def check_phases(arm: Arm) -> None:
    """Invariant 3: phases and their lengths follow from the tokens."""
    tracker = arm.scheduler.phase_tracker
    for request in (*arm.scheduler.running, *arm.scheduler.waiting):
        name = request.request_id
        record = arm.ledger.records.get(name)
        state = tracker.get(name)
        if record is None or state is None or record.is_over:
            continue
        speaker = record.speaker
        if not speaker.said:
            if state.phase is not Phase.PREFILL:
                raise Failure("phases", f"{name} said nothing and is in phase {state.phase}")
            continue
        truth = Phase.THINK if speaker.is_thinking else Phase.ANSWER
        if state.phase is not truth:
            raise Failure("phases", f"{name} is in phase {state.phase}, in truth {truth}")
        if state.think_tokens != speaker.think_tokens:
            raise Failure(
                "phases",
                f"{name} counts {state.think_tokens} think tokens, it has {speaker.think_tokens}",
            )


def check_tables(arm: Arm) -> None:
    """Invariant 1, of our own tables: what they say of a request is so."""
    scheduler = arm.scheduler
    for state in scheduler.request_states.waiting_answers:
        name, request = state.request.request_id, state.request
        if request.status not in {
            RequestStatus.PREEMPTED,
            RequestStatus.WAITING_FOR_REMOTE_KVS,
        }:
            raise Failure(
                "tables", f"{name} is taken for a preempted answer, and is {request.status!s}"
            )
    exits = scheduler.early_exit
    probes = exits.probes if exits else None
    if probes is not None:
        lost = [name for name in probes.live if name not in scheduler.requests]
        if lost:
            raise Failure("tables", f"probes that are gone count as live: {lost[:3]}")
    # Between steps nothing is being freed.
    if any(
        queue.retention is not None for queue in getattr(scheduler.kv_cache_manager, "queues", ())
    ):
        raise Failure("tables", "the next blocks to be freed count as those of a request before")
    for state in scheduler.request_states.answering:
        request = state.request
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            raise Failure(
                "tables", f"{request.request_id} is a paused session and counts as a reader"
            )
    known = {state.request.request_id for state in scheduler.request_states}
    lost = [
        name
        for name, request in scheduler.requests.items()
        if name not in known and not request.is_finished() and not isinstance(request, ProbeRequest)
    ]
    if lost:
        raise Failure("tables", f"there is no record of {lost[:3]}")
    if not known <= scheduler.requests.keys():
        gone = sorted(known - scheduler.requests.keys())
        raise Failure("tables", f"there are records of {gone[:3]}, which are gone")


def check_health(arm: Arm) -> None:
    """Invariant 6: nothing of ours failed or was switched off."""
    totals = arm.scheduler.phase_counters.totals
    faults = {
        name: number
        for name, number in totals.items()
        if name.startswith(f"{counters.FALLBACK}:") and number
    }
    if faults:
        raise Failure("health", f"fallbacks: {faults}")


def check_events(arm: Arm) -> None:
    """Invariant 2: what subscribers know of the cache is what it holds.

    Not where states are cached in parts of blocks.
    """
    pool = arm.scheduler.kv_cache_manager.block_pool
    if not pool.enable_kv_cache_events or arm.case.cache == "hybrid":
        return
    arm.publish(SimpleNamespace(events=pool.take_events()))
    keys = [block.block_hash for block in pool.blocks if block.block_hash is not None]
    held = Counter(
        (get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in keys
    )
    told = +arm.told_cached
    if told != held:
        raise Failure(
            "events",
            f"{len(told - held)} cached blocks are told and not there, {len(held - told)} are "
            "there and not told",
        )


def check_times(stock: Arm, ours: Arm) -> None:
    """Invariant 4: no answer begins much later than in stock, on average and of each request."""
    case = ours.case
    if any(case.has_fault(name) for name in _UNEQUAL):
        return
    times, arrivals = {}, {}
    for name, theirs in stock.ledger.records.items():
        own = ours.ledger.records.get(name)
        if own and own.answered_s and theirs.answered_s and theirs.ask.session is None:
            came = [record.request.arrival_time for record in (theirs, own)]
            times[name] = theirs.answered_s - came[0], own.answered_s - came[1]
            arrivals[name] = came
    if not times:
        return
    stock_s, ours_s = (sum(each) / len(times) for each in zip(*times.values(), strict=True))
    if ours_s > MOST_OF_STOCK * stock_s + MORE_STEPS * ours.tick_s:
        raise Failure(
            "times",
            f"answers of {len(times)} requests begin after {ours_s:.2f} s on average, in stock "
            f"after {stock_s:.2f} s",
        )
    patience_s = PATIENCE_AGINGS * AGING_S[case.haste]
    for name, (stock_s, ours_s) in times.items():
        if "meridian_priority" in ours.ledger.records[name].ask.extra:
            # It may have asked to wait.
            continue
        theirs_s, own_s = arrivals[name]
        if abs(own_s - theirs_s) > patience_s:
            # A later turn, which met another crowd.
            continue
        if ours_s > MOST_OF_ITS_OWN * stock_s + patience_s:
            raise Failure(
                "times",
                f"the answer of {name} begins after {ours_s:.2f} s, in stock after {stock_s:.2f} s",
            )


def check_drained(arm: Arm, *, knows_all: bool = True) -> None:
    """Invariant 8: with no request left, no block is held and no table has an entry.

    Args:
        knows_all: none of our hooks failed; a table may have missed the end of a request otherwise.
    """
    scheduler = arm.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    if arm.scheduler.requests:
        raise Failure("drained", f"requests are left: {sorted(scheduler.requests)[:3]}")
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        raise Failure("drained", f"{held} blocks are held by no request")
    if arm.is_stock or not knows_all:
        return
    check_events(arm)
    leaks = find_leaks(scheduler, set(arm.ledger.records))
    if leaks:
        raise Failure("drained", "; ".join(leaks[:4]))
