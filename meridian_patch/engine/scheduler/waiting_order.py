"""Orders vLLM's queue of waiting requests; no operation iterates over the whole queue."""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection
from heapq import heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Priorities are clamped to -4..4.
MOST_STEPS = 4
# A request is searched among so many requests from the place on where it should be.
REACH = 256

# When a request arrived, moved by its priority, and its number: several may come at once.
_Arrival = tuple[float, int]
_NO_ARRIVAL: _Arrival = (0.0, 0)
# Level and arrival, by which the queue is sorted.
_Place = tuple[int, _Arrival]
_FRONT: _Place = (-1, _NO_ARRIVAL)


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
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._numbers = count()
        # Arrivals of live requests.
        self._arrivals: dict[Any, _Arrival] = {}
        # Where live requests stand; a request without a place is at the front.
        self._places: dict[Any, _Place] = {}

    def on_added(
        self, request: "Request", waiting: Any, level: int, priority: int, now_s: float
    ) -> None:
        """Place a new request, which is last in ``waiting`` unless upstream put it elsewhere.

        Args:
            request: the new request.
            waiting: the scheduler's queue.
            level: its level.
            priority: lower goes first.
            now_s: time of a monotonic clock.
        """
        steps = max(-MOST_STEPS, min(priority, MOST_STEPS))
        arrival = now_s + steps * self._aging_s, next(self._numbers)
        self._arrivals[request] = arrival
        place = self._places[request] = (level, arrival)
        if not (isinstance(waiting, deque) and len(waiting) > 1 and waiting[-1] is request):
            return
        if self._place(waiting[-2]) > place:
            waiting.pop()
            waiting.insert(bisect_right(waiting, place, key=self._place), request)

    def on_removed(self, request: "Request") -> None:
        """Forget a request that left the scheduler."""
        self._arrivals.pop(request, None)
        self._places.pop(request, None)

    def moved_to_front(self, request: "Request") -> None:
        """Note a request that stands at the front now, as one that upstream preempted."""
        self._places[request] = _FRONT

    def put_at_level(self, request: "Request", level: int, waiting: Any) -> None:
        """Move a request that was preempted to the place of its level; ignored if it is gone."""
        if isinstance(waiting, deque) and self._take(request, waiting):
            place = self._places[request] = (level, self._arrivals.get(request, _NO_ARRIVAL))
            waiting.insert(bisect_right(waiting, place, key=self._place), request)

    def bring_forward(self, requests: Collection["Request"], waiting: Any) -> None:
        """Move those of ``requests`` that wait to the front, in this order."""
        if not isinstance(waiting, deque):
            return
        are_first = all(one is other for one, other in zip(requests, waiting, strict=False))
        for request in reversed([*requests]):
            if are_first:
                self._places[request] = _FRONT
            elif self._take(request, waiting):
                waiting.appendleft(request)
                self._places[request] = _FRONT

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
        begin = bisect_right(waiting, _FRONT, key=self._place)
        following = islice(waiting, begin, begin + REACH)
        ready = (one for one in following if one not in passed_over)
        return next((self._place(one)[1][0] for one in ready), math.inf)

    def _take(self, request: "Request", waiting: Any) -> bool:
        """Remove a request from the queue if it stands about where it should."""
        start = bisect_left(waiting, self._place(request), key=self._place)
        try:
            del waiting[waiting.index(request, start, start + REACH)]
        except ValueError:
            return False
        return True

    def _place(self, request: "Request") -> _Place:
        return self._places.get(request, _FRONT)


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
