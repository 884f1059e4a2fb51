"""Who comes in next, and who makes room: admission and time-sharing on the scheduler's queues."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from meridian_patch.engine.forecasts import Forecasts
from meridian_patch.phase.router import Phase, PhaseRouter
from meridian_patch.policy.admission import count_admissible
from meridian_patch.policy.time_sharing import Thinker, TimeSharing

# Looking at all that wait, or at everybody in every step, would cost too much.
_MOST_ADMITTED = 4
_REFRESH_STEPS = 8


class Room:
    """Room in the KV pool: gives it to newcomers and takes it from those who thought for long.

    Args:
        sharing: None switches time-sharing off.
        is_forecasting: False leaves admission to stock.
        kept_tokens: what a displacement of a request would not lose; None: nothing.
        pool_tokens: KV tokens that the forecast peak may come to.
        aging_s: after waiting this long a preempted request stands before all others, the one
            that waits longest first, and long thinkers make room for it. With time-sharing only.
    """

    def __init__(
        self,
        forecasts: Forecasts,
        sharing: TimeSharing | None,
        router: PhaseRouter,
        pool_tokens: float,
        aging_s: float,
        *,
        is_forecasting: bool,
        kept_tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self._forecasts = forecasts
        self._sharing = sharing
        self._router = router
        self._pool_tokens = pool_tokens
        self._aging_s = aging_s
        self._is_forecasting = is_forecasting
        self._kept_tokens = kept_tokens
        # Preempted requests that wait, with since when; the oldest first.
        self._away: dict[Any, float] = {}
        # Those of them that made room and stand behind newcomers.
        self._displaced: dict[Any, None] = {}
        self._is_waiting_unordered = False
        # The last answer, and for how many steps it stands where there was no room.
        self._max_active: int | None = None
        self._steps_left = 0

    def arrived(self) -> None:
        """A request came in."""
        self._is_waiting_unordered = True

    def left(self, request: Any) -> None:
        """A request is gone, and with it what it held."""
        self._back(request)
        self._steps_left = 0

    def preempted(self, request: Any, now_s: float) -> None:
        """A request was preempted, by upstream or by us."""
        if self._sharing is not None:
            self._away[request] = now_s

    def max_active(self, scheduler: Any, now_s: float) -> int | None:
        """How many requests may run after the next step; None for as many as stock admits.

        May displace a running request.
        """
        if self._away:
            self._order_waiting(scheduler, now_s)
        is_full = len(scheduler.running) >= scheduler.max_num_active_reqs
        # Load-bearing: a scheduler that is paused admits nobody, so nobody is to make room.
        is_paused = scheduler._pause_state != PauseState.UNPAUSED
        if is_full or is_paused or not scheduler.waiting:
            self._steps_left = 0
            return None
        if self._steps_left:
            self._steps_left -= 1
            return self._max_active
        has_room = self._has_room(scheduler) or self._displace(scheduler, now_s)
        self._max_active = None
        if self._is_forecasting:
            admissible = self._count_admissible(scheduler)
            # Load-bearing: requests that wait but hold blocks (KV being loaded) go first.
            holding = len(scheduler.kv_holding_waiting)
            self._max_active = len(scheduler.running) + holding + admissible
            has_room = has_room and admissible > 0
        # Where there was room somebody comes in, and the next may be let in too.
        self._steps_left = 0 if has_room else _REFRESH_STEPS - 1
        return self._max_active

    def _has_room(self, scheduler: Any) -> bool:
        """The next in line fits in now, with a block more for each that runs."""
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        needed = -(-scheduler.waiting.peek_request().num_tokens // scheduler.block_size)
        return bool(free >= needed + len(scheduler.running))

    def _count_admissible(self, scheduler: Any) -> int:
        waiting = self._forecasts.of(islice(scheduler.waiting, _MOST_ADMITTED))
        running = self._forecasts.of(scheduler.running)
        return count_admissible(running, waiting, self._pool_tokens)

    def _displace(self, scheduler: Any, now_s: float) -> bool:
        """Preempt somebody for the next in line, if the policy names anybody."""
        if self._sharing is None:
            return False
        # Whoever was preempted had its turn, unless it has waited for long since.
        head = scheduler.waiting.peek_request()
        if head.num_preemptions and not self._is_aged(head, now_s):
            return False
        chosen = self._sharing.choose(self._thinkers(scheduler))
        if chosen is None:
            return False
        request = scheduler.requests[chosen.request_id]
        scheduler.running.remove(request)
        # Load-bearing: as upstream preempts, before the step rather than in it.
        scheduler._preempt_request(
            request, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery
        )
        # Load-bearing: for model runner V1 a request that is back at once never left.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self._displaced[request] = None
        self._is_waiting_unordered = True
        self._order_waiting(scheduler, now_s)
        return True

    def _thinkers(self, scheduler: Any) -> Iterator[Thinker]:
        kept = self._kept_tokens
        newcomer = _first(scheduler.waiting)
        for request in scheduler.running:
            state = self._router.get(request.request_id)
            if (
                state is not None
                and state.phase is Phase.THINK
                and (newcomer is None or request.priority >= newcomer.priority)
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

    def _order_waiting(self, scheduler: Any, now_s: float) -> None:
        """Displaced requests stand behind newcomers; who waited long enough goes first."""
        for request in list(self._away):
            if request.status != RequestStatus.PREEMPTED:
                self._back(request)
        aged = list(takewhile(lambda request: self._is_aged(request, now_s), self._away))
        for request in aged:
            self._displaced.pop(request, None)
        # Upstream puts whom it preempts at the front.
        if aged and _first(scheduler.waiting) is not aged[0]:
            for request in reversed(_in_queue(aged, scheduler.waiting)):
                scheduler.waiting.remove_request(request)
                scheduler.waiting.prepend_request(request)
        if self._is_waiting_unordered:
            for request in _in_queue(self._displaced, scheduler.waiting):
                scheduler.waiting.remove_request(request)
                scheduler.waiting.add_request(request)
            self._is_waiting_unordered = False

    def _is_aged(self, request: Any, now_s: float) -> bool:
        return now_s - self._away.get(request, now_s) >= self._aging_s

    def _back(self, request: Any) -> None:
        self._away.pop(request, None)
        self._displaced.pop(request, None)


def _first(waiting: Any) -> Any:
    return waiting.peek_request() if waiting else None


def _in_queue(requests: Iterable[Any], waiting: Any) -> list[Any]:
    """Those that are in ``waiting``, not in the queue of those that upstream had to skip."""
    return [request for request in requests if request in waiting]


def place_by_priority(request: Any, waiting: Any, aging_s: float) -> None:
    """Move a newcomer before those that came no more than ``aging_s`` earlier and ask for less.

    Whoever ran before keeps its place. Where upstream schedules by priority, its queue does this.
    """
    # Load-bearing: the queue of first come, first served is a deque, and newcomers are its end.
    if not (isinstance(waiting, deque) and waiting and waiting[-1] is request):
        return
    for index, other in enumerate(waiting):
        is_recent = request.arrival_time - other.arrival_time < aging_s
        is_newcomer = other.status == RequestStatus.WAITING
        if other.priority > request.priority and is_recent and is_newcomer:
            waiting.pop()
            waiting.insert(index, request)
            return
