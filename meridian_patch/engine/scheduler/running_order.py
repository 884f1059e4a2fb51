"""Carries a policy's decisions out on the scheduler's own queues, and puts them back."""

import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import filterfalse
from typing import Any

from meridian_patch.engine.early_exit.probe_request import ProbeRequest
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.order_policy import OrderPolicy, RequestView

# Requests per step whose rank is looked at although nothing is known to have changed it.
AUDITED_PER_STEP = 2

# A probe is made again at the next place: nobody else's work is worth less.
_PROBE = RequestView(
    Phase.PREFILL,
    tokens_in_phase=0,
    is_handed_off=False,
    is_prefilling=True,
    num_computed_tokens=0,
    num_preemptions=0,
    priority=sys.maxsize,
)

# Rank without its drift, and the place in the stock order: no two requests have the same.
Key = tuple[tuple[int, ...], int]


class RankError(Exception):
    """The policy failed on one request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id


class RunningOrder:
    """The running requests by rank; those of equal rank stand as they were admitted.

    A step costs what changed, not what runs: only requests that are new, that ``changed`` was
    called for, or that are prefilling are ranked. Ranks that drift as requests decode (see
    ``OrderPolicy.drift``) are kept relative to a clock that advances with every step, so that
    they hold while everybody advances. What nobody told of, such as a request that got no token
    in a step, is found by looking at a few requests per step in turn. That bounds how late the
    order is: every request is ranked at least once in ``running / AUDITED_PER_STEP`` steps. An
    offload tier that fills up, or evicts, is seen so late.

    Args:
        time_budget_us: ranking stops when it takes longer, and the step keeps the order it has.
        kept_tokens: what a preemption of a request would not lose; None: nothing.
    """

    def __init__(
        self,
        policy: OrderPolicy,
        tracker: PhaseTracker,
        time_budget_us: int,
        kept_tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self._policy = policy
        self._drift = policy.drift
        self._tracker = tracker
        self._kept_tokens = kept_tokens
        self._time_budget_s = time_budget_us * 1e-6
        # The ranked requests in order, and their keys; an index means the same in both.
        self._order: list[Any] = []
        self._keys: list[Key] = []
        self._key_of: dict[Any, Key] = {}
        # Sets that keep their order, so that equal runs do equal things.
        self._changed: dict[Any, None] = {}
        # These leave their standing without any event.
        self._prefilling: dict[Any, None] = {}
        self._clock = 0
        self._num_admitted = 0
        self._next_audited = 0

    def changed(self, request: Any) -> None:
        """The rank of a request may have changed, because its phase did."""
        if request in self._key_of:
            self._changed[request] = None

    @property
    def has_prefilling(self) -> bool:
        """Whether any of the requests that were ranked was prefilling then."""
        return bool(self._prefilling)

    def pass_over(self) -> None:
        """A step needs no order; everybody advances in it."""
        self._clock += 1

    def forget(self, request: Any) -> None:
        """A request runs no more; should it run again it is a new one."""
        key = self._key_of.pop(request, None)
        if key is not None:
            self._take_out(key)
            self._changed.pop(request, None)
            self._prefilling.pop(request, None)

    def arrange(self, running: list[Any]) -> tuple[list[Any], bool]:
        """Order ``running`` by rank; to be called once per step.

        Returns:
            The list to use (a new one, or the given one when it is in order), and False when
            the time budget was exceeded and the given order stays.

        Raises:
            RankError: the policy failed; it names the request.
        """
        deadline = time.perf_counter() + self._time_budget_s
        self._clock += 1
        # Requests compare by identity: whatever upstream did to the list is seen.
        new = self._follow(running) if running != self._order else ()
        for request in (*new, *self._changed, *self._prefilling):
            if time.perf_counter() > deadline:
                return running, False
            self._place(request)
            self._changed.pop(request, None)
        self._audit(deadline)
        return (running if running == self._order else self._order.copy()), True

    def _follow(self, running: list[Any]) -> list[Any]:
        """Forget who left without a word; returns the requests that have no rank yet."""
        ranked = len(self._order)
        if running[:ranked] == self._order:
            # Nearly always: upstream appended whom it admitted.
            return running[ranked:]
        new = list(filterfalse(self._key_of.__contains__, running))
        if len(self._order) + len(new) != len(running):
            for request in list(filterfalse(set(running).__contains__, self._order)):
                self.forget(request)
        return new

    def _audit(self, deadline: float) -> None:
        for _ in range(min(AUDITED_PER_STEP, len(self._order))):
            if time.perf_counter() > deadline:
                return
            self._next_audited = (self._next_audited + 1) % len(self._order)
            self._place(self._order[self._next_audited])

    def _place(self, request: Any) -> None:
        """Rank a request and put it where it belongs."""
        view = self._view(request)
        rank = self._rank(request, view)
        old = self._key_of.get(request)
        if old is None:
            self._num_admitted += 1
            key = (rank, self._num_admitted)
        else:
            key = (rank, old[1])
        if view.is_prefilling:
            self._prefilling[request] = None
        else:
            self._prefilling.pop(request, None)
        if key == old:
            return
        if old is not None:
            self._take_out(old)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._order.insert(index, request)
        self._key_of[request] = key

    def _take_out(self, key: Key) -> None:
        index = bisect_left(self._keys, key)
        del self._keys[index], self._order[index]

    def _rank(self, request: Any, view: RequestView) -> tuple[int, ...]:
        try:
            rank = self._policy.rank(view)
            drift = self._drift.get(rank[0])
        except Exception as error:
            raise RankError(request.request_id) from error
        if drift is None:
            return rank
        return (*rank[:-1], rank[-1] - drift * self._clock)

    def _view(self, request: Any) -> RequestView:
        if isinstance(request, ProbeRequest):
            return _PROBE
        state = self._tracker.get(request.request_id)
        if state is None:
            phase, tokens_in_phase, is_handed_off = Phase.ANSWER, 0, False
        else:
            phase = state.phase
            tokens_in_phase = state.tokens_in_phase
            is_handed_off = state.is_handed_off
        return RequestView(
            phase,
            tokens_in_phase,
            is_handed_off,
            # Load-bearing: True while a scheduled chunk leaves known tokens uncomputed.
            bool(request.is_prefill_chunk),
            request.num_computed_tokens,
            request.num_preemptions,
            self._kept_tokens(request) if self._kept_tokens else 0,
            request.priority,
        )


class ArrivalOrder:
    """Makes vLLM's priority policy preempt by our order among requests of equal priority.

    Load-bearing: under ``--scheduling-policy priority`` the victim is the running request with
    the greatest ``(priority, arrival_time)``, wherever it stands. For the length of one step the
    arrival times of the running requests follow their order. A request that is preempted gets its
    own back before it is put into the queue, which is a heap by these times.
    """

    def __init__(self, running: list[Any]) -> None:
        self._arrivals = {request: request.arrival_time for request in running}
        earliest = min(self._arrivals.values(), default=0.0)
        for place, request in enumerate(running):
            request.arrival_time = earliest + place * 1e-6

    def restore_one(self, request: Any) -> None:
        """Give a request its true arrival time back; unknown requests are fine."""
        arrival = self._arrivals.pop(request, None)
        if arrival is not None:
            request.arrival_time = arrival

    def restore(self) -> None:
        """Give back the true arrival times."""
        for request, arrival in self._arrivals.items():
            request.arrival_time = arrival
