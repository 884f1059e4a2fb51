"""Where requests stand in vLLM's queue of waiting ones; no operation iterates over all of it."""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection
from heapq import heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from meridian_patch.engine.request_state import (
    FRONT,
    NOT_PLACED,
    Place,
    RequestState,
    RequestStates,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Priorities are clamped to -4..4.
MOST_STEPS = 4
# A request is searched among so many requests from the place on where it should be.
REACH = 256


class WaitingOrder:
    """Keeps the FCFS (first come, first served) waiting queue in its own order.

    1. Requests that upstream or ``bring_forward`` put at the front.
    2. Others by level, the lowest first.
    3. Within a level by arrival time. A step of priority counts as ``aging_s`` seconds of waiting,
       at most ``MOST_STEPS`` steps.

    So the order is total. Places are found by bisection. A request that does not stand where it
    should is searched nearby; if it is not found, it keeps its position until the requests before
    it have left.

    Load-bearing: the FCFS queue is a deque, and upstream appends new requests. A priority queue
    keeps its own order; only ``first`` applies to it.

    Args:
        states: records of all requests, with their places; one without a record is at the front.
        aging_s: see above.
    """

    def __init__(self, states: RequestStates, aging_s: float) -> None:
        self._states = states
        self._aging_s = aging_s
        self._numbers = count(1)

    def place_new(
        self, state: RequestState, waiting: Any, level: int, priority: int, now_s: float
    ) -> None:
        """Place a new request, which is last in ``waiting`` unless upstream put it elsewhere.

        Args:
            state: the new request.
            waiting: the scheduler's queue.
            level: its level.
            priority: lower goes first.
            now_s: time of a monotonic clock.
        """
        steps = max(-MOST_STEPS, min(priority, MOST_STEPS))
        request = state.request
        state.arrival = now_s + steps * self._aging_s, next(self._numbers)
        place = state.place = (level, state.arrival)
        if not (isinstance(waiting, deque) and len(waiting) > 1 and waiting[-1] is request):
            return
        if self.place_of(waiting[-2]) > place:
            waiting.pop()
            waiting.insert(bisect_right(waiting, place, key=self.place_of), request)

    def put_at_level(self, state: RequestState, level: int, waiting: Any) -> None:
        """Move a request that was preempted to the place of its level; ignored if it is gone."""
        if isinstance(waiting, deque) and self._take(state.request, waiting):
            place = state.place = (level, state.arrival)
            waiting.insert(bisect_right(waiting, place, key=self.place_of), state.request)

    def bring_forward(self, states: Collection[RequestState], waiting: Any) -> None:
        """Move those of the requests that wait to the front, in this order."""
        if not isinstance(waiting, deque):
            return
        are_first = all(
            state.request is other for state, other in zip(states, waiting, strict=False)
        )
        for state in reversed([*states]):
            if are_first:
                state.place = FRONT
            elif self._take(state.request, waiting):
                waiting.appendleft(state.request)
                state.place = FRONT

    def sort_by_arrival(self, waiting: Any, now_s: float) -> None:
        """Put requests that wait by level and priority in the order in which they came.

        They do so from now on, and no later one goes before them. One that was never placed stays
        behind the one that it stands behind.
        """
        if not isinstance(waiting, deque):
            return
        places, place = {}, FRONT
        for request in waiting:
            state = self._states.get(request.request_id)
            if state is not None and state.place != FRONT:
                state.arrival = now_s, state.arrival[1]
                state.place = (0, state.arrival)
            if state is None or state.arrival != NOT_PLACED:
                place = self.place_of(request)
            places[request] = place
        in_order = sorted(waiting, key=places.__getitem__)
        waiting.clear()
        waiting.extend(in_order)

    def next_arrival_s(self, waiting: Any, passed_over: Any) -> float:
        """Arrival, moved by its priority, of the first request that was not put at the front.

        Args:
            waiting: the scheduler's queue.
            passed_over: requests that upstream may pass over for long; they do not count.

        Returns:
            Infinity if there is none among the first ``REACH``.
        """
        if not isinstance(waiting, deque):
            return math.inf
        begin = bisect_right(waiting, FRONT, key=self.place_of)
        following = islice(waiting, begin, begin + REACH)
        ready = (one for one in following if one not in passed_over)
        return next((self.place_of(one)[1][0] for one in ready), math.inf)

    def place_of(self, request: "Request") -> Place:
        """Where a request should stand."""
        state = self._states.get(request.request_id)
        return FRONT if state is None else state.place

    def _take(self, request: "Request", waiting: Any) -> bool:
        """Remove a request from the queue if it stands about where it should."""
        start = bisect_left(waiting, self.place_of(request), key=self.place_of)
        try:
            del waiting[waiting.index(request, start, start + REACH)]
        except ValueError:
            return False
        return True


def first(waiting: Any, count: int) -> list[Any]:
    """The first ``count`` requests of a queue, or all if there are fewer, in order."""
    if isinstance(waiting, deque):
        return list(islice(waiting, count))
    # Load-bearing: a priority queue keeps a heap in this list; iterating over the queue copies it.
    heap = waiting._heap
    found: list[Any] = []
    nearest = [(heap[0], 0)] if heap else []
    while nearest and len(found) < count:
        request, index = heappop(nearest)
        found.append(request)
        for child in (2 * index + 1, 2 * index + 2):
            if child < len(heap):
                heappush(nearest, (heap[child], child))
    return found
