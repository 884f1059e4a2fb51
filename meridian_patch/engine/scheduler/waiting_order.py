"""Orders vLLM's queue of waiting requests; no operation iterates over the whole queue."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from itertools import islice
from typing import Any

# Priorities are clamped to -4..4.
MOST_STEPS = 4
# A request is searched among so many requests at an end of the queue.
REACH = 256

_FRONT, _BEHIND = float("-inf"), float("inf")


class WaitingOrder:
    """Keeps the FCFS (first come, first served) waiting queue in its own order.

    1. Preempted requests, which upstream puts at the front; those brought forward come first.
    2. New requests by arrival time. A step of priority counts as ``aging_s`` seconds of waiting,
       at most ``MOST_STEPS`` steps. So the order is total, and limits how much later a request may
       arrive and still overtake another.
    3. Requests that were preempted to make room, in the order of their preemption.

    A new request is placed by bisection. Preempted requests are searched only at the end of the
    queue where they usually are: those of item 3 at the back, others at the front. One that is not
    found keeps its position until the requests before it have left.

    Load-bearing: the FCFS queue is a deque, and upstream appends new requests. A priority queue
    keeps its own order; only ``first`` applies to it.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        # Sort keys of live requests; a request without one is at the front.
        self._places: dict[Any, float] = {}
        self._preempted_for_room: dict[Any, None] = {}
        # Live requests of a priority other than 0.
        self._with_priority: set[Any] = set()

    def on_added(self, request: Any, waiting: Any, priority: int, now_s: float) -> None:
        """Place a new request, which is last in ``waiting`` unless upstream put it elsewhere.

        Args:
            request: the new request.
            waiting: the scheduler's queue.
            priority: lower goes first.
            now_s: time of a monotonic clock.
        """
        steps = max(-MOST_STEPS, min(priority, MOST_STEPS))
        place = self._places[request] = now_s + steps * self._aging_s
        if priority:
            self._with_priority.add(request)
        if not (self._preempted_for_room or self._with_priority):
            return
        if not (isinstance(waiting, deque) and waiting and waiting[-1] is request):
            return
        index = bisect_right(waiting, place, hi=len(waiting) - 1, key=self._place)
        if index < len(waiting) - 1:
            waiting.pop()
            waiting.insert(index, request)

    def on_removed(self, request: Any) -> None:
        """Forget a request that left the scheduler."""
        self._places.pop(request, None)
        self._preempted_for_room.pop(request, None)
        self._with_priority.discard(request)

    def moved_to_front(self, request: Any) -> None:
        """Note a request that stands at the front now, as one that upstream preempted."""
        self._places[request] = _FRONT
        self._preempted_for_room.pop(request, None)

    def put_behind(self, request: Any, waiting: Any) -> None:
        """Move a request that was just preempted to the back, until it is brought forward."""
        if not isinstance(waiting, deque):
            return
        if _take({request}, REACH, waiting.popleft, waiting.extendleft, len(waiting)):
            waiting.append(request)
            self._places[request] = _BEHIND
            self._preempted_for_room[request] = None

    def bring_forward(self, requests: Collection[Any], waiting: Any) -> None:
        """Move those of ``requests`` that wait to the front, in this order."""
        if not isinstance(waiting, deque) or all(
            one is other for one, other in zip(requests, waiting, strict=False)
        ):
            return
        wanted = set(requests)
        behind = wanted.intersection(self._preempted_for_room)
        found = _take(wanted - behind, REACH, waiting.popleft, waiting.extendleft, len(waiting))
        if behind:
            reach = len(self._preempted_for_room) + REACH
            found |= _take(behind, reach, waiting.pop, waiting.extend, len(waiting))
        waiting.extendleft(request for request in reversed([*requests]) if request in found)
        for request in found:
            self.moved_to_front(request)

    def _place(self, request: Any) -> float:
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


def _take(
    wanted: Collection[Any],
    reach: int,
    pop: Callable[[], Any],
    extend: Callable[[Iterable[Any]], None],
    length: int,
) -> set[Any]:
    """Remove those of ``wanted`` that are among the first ``reach`` at one end of a queue.

    Args:
        wanted: requests to remove.
        reach: upper bound of requests to examine.
        pop: removes a request at that end.
        extend: puts requests back at that end, one after the other.
        length: length of the queue.

    Returns:
        The requests that were removed.
    """
    found: set[Any] = set()
    passed = []
    for _ in range(min(reach, length)):
        if len(found) == len(wanted):
            break
        request = pop()
        if request in wanted:
            found.add(request)
        else:
            passed.append(request)
    extend(reversed(passed))
    return found
