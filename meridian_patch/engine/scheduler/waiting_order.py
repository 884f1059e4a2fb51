"""Places in vLLM's queue of waiting requests; nothing here walks through the queue."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from itertools import islice
from typing import Any

# Steps of priority that count, up and down from 0.
MOST_STEPS = 4
# Requests at the front of the queue, and behind it, among which a request is looked for.
REACH = 256

_FRONT, _BEHIND = float("-inf"), float("inf")


class WaitingOrder:
    """Keeps the queue of first come, first served, in an order of its own.

    1. First what upstream put there: requests that were preempted. Those brought forward stand
       before them.
    2. Newcomers, by when they came; a step of priority counts as ``aging_s`` seconds of waiting,
       at most ``MOST_STEPS`` steps. So the order is total, and it bounds how late a request may
       come and still overtake.
    3. Displaced requests, in the order in which they made room.

    A newcomer is placed by bisection. A displaced request stands near the end of the queue and any
    other preempted one near its front, so only there are they looked for; one that is not found
    keeps its place until those before it have left.

    Load-bearing: the queue of first come, first served is a deque, and newcomers are its end. A
    queue by priority orders itself, and nothing here is called for it but ``first``.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        # Of live requests; a request without a place stands at the front.
        self._places: dict[Any, float] = {}
        self._displaced: dict[Any, None] = {}
        # Live requests of a priority other than 0.
        self._with_priority: set[Any] = set()

    def arrived(self, request: Any, waiting: Any, priority: int, now_s: float) -> None:
        """A request came in; it is the last in ``waiting`` unless upstream holds it elsewhere.

        Args:
            request: the newcomer.
            waiting: the scheduler's queue.
            priority: lower goes first.
            now_s: of a steady clock.
        """
        steps = max(-MOST_STEPS, min(priority, MOST_STEPS))
        place = self._places[request] = now_s + steps * self._aging_s
        if priority:
            self._with_priority.add(request)
        if not (self._displaced or self._with_priority):
            return
        if not (isinstance(waiting, deque) and waiting and waiting[-1] is request):
            return
        index = bisect_right(waiting, place, hi=len(waiting) - 1, key=self._place)
        if index < len(waiting) - 1:
            waiting.pop()
            waiting.insert(index, request)

    def left(self, request: Any) -> None:
        """A request is gone."""
        self._places.pop(request, None)
        self._displaced.pop(request, None)
        self._with_priority.discard(request)

    def preempted(self, request: Any) -> None:
        """A request was preempted; upstream puts it at the front."""
        self._places[request] = _FRONT
        self._displaced.pop(request, None)

    def put_behind(self, request: Any, waiting: Any) -> None:
        """A request that was just preempted goes behind all others until it is brought forward."""
        if not isinstance(waiting, deque):
            return
        if _take({request}, REACH, waiting.popleft, waiting.extendleft, len(waiting)):
            waiting.append(request)
            self._places[request] = _BEHIND
            self._displaced[request] = None

    def bring_forward(self, requests: Collection[Any], waiting: Any) -> None:
        """Those of ``requests`` that wait go first, in this order."""
        if not isinstance(waiting, deque) or all(
            one is other for one, other in zip(requests, waiting, strict=False)
        ):
            return
        wanted = set(requests)
        behind = wanted.intersection(self._displaced)
        found = _take(wanted - behind, REACH, waiting.popleft, waiting.extendleft, len(waiting))
        if behind:
            reach = len(self._displaced) + REACH
            found |= _take(behind, reach, waiting.pop, waiting.extend, len(waiting))
        waiting.extendleft(request for request in reversed([*requests]) if request in found)
        for request in found:
            self.preempted(request)

    def _place(self, request: Any) -> float:
        return self._places.get(request, _FRONT)


def first(waiting: Any, count: int) -> list[Any]:
    """The first ``count`` requests of a queue, or all if there are fewer, in order."""
    if isinstance(waiting, deque):
        return list(islice(waiting, count))
    # Load-bearing: a queue by priority is a heap in this list; iterating the queue copies it.
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
    """Take those of ``wanted`` out that are among the ``reach`` nearest to one end of a queue.

    Args:
        wanted: requests.
        reach: how many are looked at, at most.
        pop: takes one from that end.
        extend: puts one after the other back there.
        length: of the queue.
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
