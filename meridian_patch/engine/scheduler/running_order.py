"""Orders the running requests by the policy's ranks, and the arrival times by that order."""

import sys
import time
from bisect import bisect_left
from itertools import filterfalse
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy

from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.running_order import LatencyPolicy, RequestView
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import Fallback, PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

# Requests per step that are ranked again although no change is known.
AUDITED_PER_STEP = 2

# Probes rank last: a preempted probe loses least, because a later one replaces it.
_PROBE = RequestView(
    Phase.PREFILL,
    tokens_in_phase=0,
    is_handed_off=False,
    is_prefilling=True,
    think_tokens=0,
    prompt_tokens=0,
    priority=sys.maxsize,
)

# Rank, and the index in stock order, which makes keys unique.
Key = tuple[tuple[int, ...], int]


class RankError(Exception):
    """The policy raised an exception for one request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id


class RunningOrder:
    """Keeps the running requests sorted by rank; equal ranks stay in order of admission.

    The cost of a step depends on the number of changes, not on the number of requests. Only new
    requests, those that ``changed`` was called for, and prefilling ones are ranked.

    Other changes, such as a thinker that reached the next level, are not reported. To find them, a
    few requests are ranked again in each step, in turn. So every request is ranked at least once in
    ``running / AUDITED_PER_STEP`` steps.

    Args:
        policy: gives the ranks.
        tracker: phases of all requests.
        time_budget_us: ranking stops when it takes longer, and the step keeps its given order.
    """

    def __init__(
        self,
        policy: LatencyPolicy,
        tracker: PhaseTracker,
        time_budget_us: int,
    ) -> None:
        self._policy = policy
        self._tracker = tracker
        self._time_budget_s = time_budget_us * 1e-6
        # The ranked requests in order, and their keys at the same indices.
        self._order: list[Any] = []
        self._keys: list[Key] = []
        self._key_of: dict[Any, Key] = {}
        # Dictionaries serve as ordered sets, so that equal runs behave equally.
        self._changed: dict[Any, None] = {}
        # Their ranks change without an event, so they are ranked in each step.
        self._prefilling: dict[Any, None] = {}
        self._num_admitted = 0
        self._next_audited = 0

    def changed(self, request: "Request") -> None:
        """Rank a request again in the next step, because its phase changed."""
        if request in self._key_of:
            self._changed[request] = None

    @property
    def has_prefilling(self) -> bool:
        """Whether any request was prefilling when it was ranked last."""
        return bool(self._prefilling)

    def forget(self, request: "Request") -> None:
        """Remove a request that no longer runs; if it runs again it is ranked as new."""
        key = self._key_of.pop(request, None)
        if key is not None:
            self._take_out(key)
            self._changed.pop(request, None)
            self._prefilling.pop(request, None)

    def forget_all(self) -> None:
        """Remove all requests, because they are ordered no longer."""
        for request in list(self._order):
            self.forget(request)

    def as_admitted(self, running: list["Request"]) -> list["Request"]:
        """``running`` in the order of admission, and forget all ranks."""
        last = self._num_admitted + 1
        admitted = {request: number for request, (_, number) in self._key_of.items()}
        self.forget_all()
        return sorted(running, key=lambda request: admitted.get(request, last))

    def arrange(self, running: list["Request"]) -> tuple[list[Any], bool]:
        """Order ``running`` by rank; to be called once per step.

        Returns:
            The list to use (a new one, or the given one when it is in order), and False when
            the time budget was exceeded and the given order stays.

        Raises:
            RankError: the policy failed; it names the request.
        """
        deadline = time.perf_counter() + self._time_budget_s
        # Requests compare by identity, so any change that upstream made to the list is found.
        new = self._follow(running) if running != self._order else ()
        for request in (*new, *self._changed, *self._prefilling):
            if time.perf_counter() > deadline:
                return running, False
            self._place(request)
            self._changed.pop(request, None)
        self._audit(deadline)
        return (running if running == self._order else self._order.copy()), True

    def _follow(self, running: list["Request"]) -> list[Any]:
        """Remove requests that upstream took out; returns the requests without a rank."""
        ranked = len(self._order)
        if running[:ranked] == self._order:
            # The usual case: upstream only appended admitted requests.
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

    def _place(self, request: "Request") -> None:
        """Rank a request and move it to its position."""
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

    def _rank(self, request: "Request", view: RequestView) -> tuple[int, ...]:
        try:
            return self._policy.rank(view)
        except Exception as error:
            raise RankError(request.request_id) from error

    def _view(self, request: "Request") -> RequestView:
        if isinstance(request, ProbeRequest):
            return _PROBE
        state = self._tracker.get(request.request_id)
        if state is None:
            phase, tokens_in_phase, is_handed_off, think_tokens = Phase.ANSWER, 0, False, 0
        else:
            phase, think_tokens = state.phase, state.think_tokens
            tokens_in_phase = state.tokens_in_phase
            is_handed_off = state.is_handed_off
        return RequestView(
            phase,
            tokens_in_phase,
            is_handed_off,
            # Load-bearing: True while a scheduled chunk leaves known tokens uncomputed.
            bool(request.is_prefill_chunk),
            think_tokens,
            request.num_prompt_tokens,
            request.priority,
        )


class OrderPart(SchedulerPart):
    """Puts the running requests in the policy's order, behind all limits of a step.

    Args:
        scheduler: the phase-aware scheduler.
        order: the order of running requests.
        time_budget_us: limits or an order that took longer are counted as slow.
        phase_counters: count slow steps.
        is_on: whether the rule ``order`` is.
    """

    name = counters.POLICY

    def __init__(
        self,
        scheduler: "PhaseScheduling",
        order: RunningOrder,
        time_budget_us: int,
        phase_counters: PhaseCounters,
        *,
        is_on: bool,
    ) -> None:
        self.time_budget_s = time_budget_us * 1e-6
        self.order = order
        self._scheduler = scheduler
        self._counters = phase_counters
        self._is_on = is_on

    def on_turn_ended(self, session: "Request") -> None:
        self.order.forget(session)

    def on_freed(self, request: "Request") -> None:
        self.order.forget(request)

    def on_probe_preempted(self, probe: "Request") -> None:
        self.order.forget(probe)

    def on_probe_freed(self, probe: "Request") -> None:
        self.order.forget(probe)

    def on_switched_off(self) -> None:
        self.order.forget_all()

    def before_schedule(self, plan: StepPlan) -> None:
        if not plan.is_contended:
            return
        now_s = time.perf_counter()
        plan.limits_s = now_s - plan.begun_s
        # Limits apply even if computing them took too long: the time is already spent by then, and
        # on a busy machine a step without limits would take longer still.
        is_slow = plan.limits_s > self.time_budget_s
        if self._is_on:
            is_slow |= not self.order_running(plan)
            plan.order_s = time.perf_counter() - now_s
        if is_slow:
            self._counters.count(counters.FALLBACK, Fallback.SLOW)

    def order_running(self, plan: StepPlan) -> bool:
        """Put the running requests in the policy's order; returns whether it was in time."""
        scheduler = self._scheduler
        # Load-bearing: the order of `running` affects only which requests get tokens first and
        # which is preempted (the last, under FCFS), in the scheduler and in the model runner.
        scheduler.running, is_in_time = self.order.arrange(scheduler.running)
        if scheduler.policy == SchedulingPolicy.PRIORITY:
            plan.arrivals = ArrivalOrder(scheduler.running)
        return is_in_time


class ArrivalOrder:
    """Makes vLLM's priority policy preempt in the policy's order among equal priorities.

    Load-bearing: under ``--scheduling-policy priority`` the victim is the running request with
    the greatest ``(priority, arrival_time)``, at any index. For one step, the arrival times of the
    running requests are replaced by increasing ones in the policy's order. A preempted request
    gets its true arrival time back before it enters the waiting queue, a heap by these times.
    """

    def __init__(self, running: list["Request"]) -> None:
        self._arrivals = {request: request.arrival_time for request in running}
        earliest = min(self._arrivals.values(), default=0.0)
        for place, request in enumerate(running):
            request.arrival_time = earliest + place * 1e-6

    def true_s(self, request: "Request") -> float:
        """A request's own arrival time, in seconds."""
        return self._arrivals.get(request, request.arrival_time)

    def restore_one(self, request: "Request") -> None:
        """Restore a request's true arrival time; unknown requests are ignored."""
        arrival = self._arrivals.pop(request, None)
        if arrival is not None:
            request.arrival_time = arrival

    def restore(self) -> None:
        """Restore the true arrival times of all requests."""
        for request, arrival in self._arrivals.items():
            request.arrival_time = arrival
