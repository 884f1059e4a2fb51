"""Which request comes in next, and which make room: admission and time-sharing."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice, takewhile
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from meridian_patch.engine.early_exit.probe_request import ProbeRequest
from meridian_patch.engine.scheduler.admission_checks import (
    NextStep,
    freed_blocks,
    needed_blocks,
    next_in_line,
    num_seated,
    taken_blocks,
)
from meridian_patch.engine.scheduler.kv_demand import KVDemand
from meridian_patch.engine.scheduler.refusals import Refusals
from meridian_patch.engine.scheduler.waiting_order import WaitingOrder, first
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.admission import count_admissible
from meridian_patch.policy.time_sharing import Thinker, TimeSharing

# Looking at all requests that wait, or at all that run in every step, would cost too much.
_MOST_ADMITTED = 4
_REFRESH_STEPS = 8
_MOST_AGED = 8


class Admission:
    """Room in the KV pool: for newcomers, taken from requests that thought for long.

    Args:
        waiting_order: of the scheduler's queue.
        sharing: None switches time-sharing off.
        is_forecasting: False leaves admission to stock.
        kept_tokens: what a displacement of a request would not lose; None: nothing.
        pool_tokens: KV tokens that the forecast peak may come to.
        aging_s: after waiting this long a preempted request stands before all others, the one
            that waits longest first, and long thinkers make room for it. With time-sharing only.
    """

    def __init__(
        self,
        kv_demand: KVDemand,
        waiting_order: WaitingOrder,
        sharing: TimeSharing | None,
        tracker: PhaseTracker,
        pool_tokens: float,
        aging_s: float,
        *,
        is_forecasting: bool,
        kept_tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self._kv_demand = kv_demand
        self._waiting_order = waiting_order
        self._sharing = sharing
        self._tracker = tracker
        self._pool_tokens = pool_tokens
        self._aging_s = aging_s
        self._is_forecasting = is_forecasting
        self._kept_tokens = kept_tokens
        # Preempted requests that wait, with since when; the oldest first.
        self._away: dict[Any, float] = {}
        # Requests for which others were displaced, with how often they had been preempted by then.
        self._made_room: dict[Any, int] = {}
        # Made where there is a connector: what it answers is not foreseen.
        self._refusals: Refusals | None = None
        # The last answer, and for how many steps it stands where there was no room.
        self._max_active: int | None = None
        self._steps_left = 0

    def left(self, request: Any) -> None:
        """A request is gone, and with it what it held."""
        self._away.pop(request, None)
        self._made_room.pop(request, None)
        if self._refusals:
            self._refusals.left(request)
        self._steps_left = 0

    def preempted(self, request: Any, now_s: float) -> None:
        """A request was preempted, by upstream or by us."""
        if self._sharing is not None:
            self._away.pop(request, None)
            self._away[request] = now_s

    def resumed(self, request: Any) -> None:
        """A request runs again, or for the first time."""
        self._away.pop(request, None)

    def bring_aged(self, scheduler: Any, now_s: float) -> None:
        """Requests that waited for long enough go first, the one that waits longest before all."""
        if not self._away:
            return
        aged = list(
            islice(takewhile(lambda one: self._is_aged(one, now_s), self._away), _MOST_AGED)
        )
        for request in aged:
            if request.status != RequestStatus.PREEMPTED:
                self.resumed(request)
        self._waiting_order.bring_forward(
            [request for request in aged if request in self._away], scheduler.waiting
        )

    def max_active(self, scheduler: Any, now_s: float, step: NextStep) -> int | None:
        """How many requests may run after the next step, probes not counted; None: as in stock.

        May displace running requests.

        Args:
            scheduler: the phase-aware one.
            now_s: by the steady clock.
            step: the next one.
        """
        is_full = num_seated(scheduler) >= scheduler.max_num_active_reqs
        # Load-bearing: a scheduler that is paused admits no request, so none is to make room.
        is_paused = scheduler._pause_state != PauseState.UNPAUSED
        if is_full or is_paused or not scheduler.waiting:
            self._steps_left = 0
            return None
        if self._steps_left:
            self._steps_left -= 1
            return self._max_active
        has_room = self._has_room(scheduler, now_s, step)
        self._max_active = None
        if self._is_forecasting:
            running = [one for one in scheduler.running if not isinstance(one, ProbeRequest)]
            admissible = self._count_admissible(scheduler, running)
            # Load-bearing: requests that wait but hold blocks (KV being loaded, or the next chunk
            # of a session) go first. Paused sessions hold a seat each, and blocks but for those
            # that were preempted while their last token was on the way.
            holding = len(scheduler.kv_holding_waiting)
            holding = max(holding, scheduler.num_waiting_for_streaming_input)
            self._max_active = len(running) + holding + admissible
            has_room = has_room and admissible > 0
        # Where there was room a request comes in, and the next may be let in too.
        self._steps_left = 0 if has_room else _REFRESH_STEPS - 1
        return self._max_active

    def _count_admissible(self, scheduler: Any, running: list[Any]) -> int:
        waiting = self._kv_demand.of(first(scheduler.waiting, _MOST_ADMITTED))
        pool_tokens, holding = self._pool_tokens, []
        for request in scheduler.kv_holding_waiting:
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                # A paused session does not grow, and no end is in sight of what it holds.
                pool_tokens -= request.num_computed_tokens
            else:
                holding.append(request)
        return count_admissible(self._kv_demand.of([*running, *holding]), waiting, pool_tokens)

    def _has_room(self, scheduler: Any, now_s: float, step: NextStep) -> bool:
        """The next in line fits in with what the running requests take, or is given room."""
        newcomer = next_in_line(scheduler, step)
        if newcomer is None:
            return True
        missing = self._num_missing(scheduler, newcomer)
        # A block more for each request that runs is more than enough where none computes a prompt.
        if missing + len(scheduler.running) <= 0:
            return True
        if not self._may_displace_for(newcomer, now_s):
            return False
        # Otherwise it is known in the next step.
        is_known = self._lacks_only_blocks(scheduler, newcomer)
        return not is_known or self._displace(scheduler, newcomer, missing, now_s, step)

    def _lacks_only_blocks(self, scheduler: Any, newcomer: Any) -> bool:
        """Whether nothing else keeps the next in line out, as far as can be known.

        A connector may not know yet what it has of a request, and upstream skips the request then:
        with one, upstream must have wanted the blocks in vain.
        """
        if scheduler.connector is None and scheduler.ec_connector is None:
            return True
        if self._refusals is None:
            self._refusals = Refusals(scheduler.kv_cache_manager)
        return self._refusals.is_last(newcomer)

    def _num_missing(self, scheduler: Any, newcomer: Any) -> int:
        """Blocks that it lacks before the running requests take theirs."""
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        reserved = self._refusals.reserved_blocks(newcomer) if self._refusals else 0
        return int(needed_blocks(scheduler, newcomer) + reserved - free)

    def _may_displace_for(self, newcomer: Any, now_s: float) -> bool:
        if self._sharing is None:
            return False
        # A request that was preempted had its turn, unless it has waited for long since. One that
        # was not admitted into the room made for it lacks something else.
        was_served = self._made_room.get(newcomer) == newcomer.num_preemptions
        return not was_served and (not newcomer.num_preemptions or self._is_aged(newcomer, now_s))

    def _displace(
        self, scheduler: Any, newcomer: Any, missing: int, now_s: float, step: NextStep
    ) -> bool:
        """Preempt thinkers for a newcomer, if it lacks blocks and the policy names enough of them.

        With a thinker its LoRA adapter may go, which lets another request come first; then it is
        that one for which room is made, or none.
        """
        taken = taken_blocks(scheduler, step)
        for _ in range(2):
            missing += sum(taken.values())
            if missing <= 0:
                return True
            chosen = self._choose(scheduler, newcomer, missing, taken)
            if not chosen:
                return False
            names = [thinker.request_id for thinker in chosen]
            first_in = newcomer
            if scheduler.lora_config:
                first_in = next_in_line(scheduler, step, names)
            if first_in is newcomer and self._fits_without(scheduler, names):
                self._preempt(scheduler, names)
                self._made_room[newcomer] = newcomer.num_preemptions
                return True
            assert self._sharing is not None
            self._sharing.refund(chosen)
            if (
                first_in is None
                or first_in is newcomer
                or not self._lacks_only_blocks(scheduler, first_in)
                or not self._may_displace_for(first_in, now_s)
            ):
                return False
            newcomer, missing = first_in, self._num_missing(scheduler, first_in)
        return False

    def _choose(
        self, scheduler: Any, newcomer: Any, missing: int, taken: dict[str, int]
    ) -> list[Thinker]:
        """Thinkers that are to make room; none where they do not suffice."""
        assert self._sharing is not None
        requests = scheduler.requests
        return self._sharing.choose(
            self._thinkers(scheduler, newcomer),
            missing,
            # A displaced request takes no block either.
            lambda thinker: (
                freed_blocks(scheduler, requests[thinker.request_id], newcomer)
                + taken.get(thinker.request_id, 0)
            ),
        )

    def _preempt(self, scheduler: Any, names: Iterable[str]) -> None:
        for name in names:
            request = scheduler.requests[name]
            scheduler.running.remove(request)
            # Load-bearing: as upstream preempts, before the step rather than in it.
            scheduler._preempt_request(
                request, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery
            )
            # Load-bearing: for model runner V1 a request that is back at once never left.
            scheduler.prev_step_scheduled_req_ids.discard(name)
            self._waiting_order.put_behind(request, scheduler.waiting)

    def _fits_without(self, scheduler: Any, names: Collection[str]) -> bool:
        """Whether one more is admissible once these have made room."""
        if not self._is_forecasting:
            return True
        left = [
            one
            for one in scheduler.running
            if one.request_id not in names and not isinstance(one, ProbeRequest)
        ]
        return self._count_admissible(scheduler, left) > 0

    def _thinkers(self, scheduler: Any, newcomer: Any) -> Iterator[Thinker]:
        kept = self._kept_tokens
        for request in scheduler.running:
            state = self._tracker.get(request.request_id)
            if (
                state is not None
                and state.phase is Phase.THINK
                and request.priority >= newcomer.priority
                and not request.is_prefill_chunk
                # Load-bearing: False while a step in flight still writes the blocks.
                and scheduler._request_blocks_can_be_freed(request)
            ):
                yield Thinker(
                    request.request_id,
                    request.num_computed_tokens - (kept(request) if kept else 0),
                    state.think_tokens,
                    request.num_preemptions,
                )

    def _is_aged(self, request: Any, now_s: float) -> bool:
        return now_s - self._away.get(request, now_s) >= self._aging_s
