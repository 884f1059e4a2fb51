"""Carries a policy's decisions out on the scheduler's own queues, and puts them back."""

import time
from typing import Any

from meridian_patch.phase.router import Phase, PhaseRouter
from meridian_patch.policy.base import OrderPolicy, RequestView


class RankError(Exception):
    """The policy failed on one request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id


class RunningOrder:
    """The order of the running requests under a policy.

    It is computed anew only after something happened that can change it.

    Args:
        time_budget_us: ranking stops when it takes longer, and the step keeps the order it has.
    """

    def __init__(self, policy: OrderPolicy, router: PhaseRouter, time_budget_us: int) -> None:
        self._policy = policy
        self._router = router
        self._time_budget_s = time_budget_us * 1e-6
        self._is_stale = True

    def invalidate(self) -> None:
        """Something happened: an admission, a preemption, a phase change."""
        self._is_stale = True

    def arrange(self, running: list[Any]) -> tuple[list[Any], bool]:
        """Order ``running`` by rank.

        Returns:
            The list to use (a new one, or the given one when nothing changed), and False when
            the time budget was exceeded and the given order stays.

        Raises:
            RankError: the policy failed; it names the request.
        """
        if not self._is_stale:
            return running, True
        ranks = {}
        any_prefilling = False
        deadline = time.perf_counter() + self._time_budget_s
        for request in running:
            if time.perf_counter() > deadline:
                return running, False
            view = self._view(request)
            ranks[request.request_id] = self._rank(request, view)
            any_prefilling |= view.is_prefilling
        # A request that is still prefilling leaves that standing without any event.
        self._is_stale = any_prefilling
        return sorted(running, key=lambda request: ranks[request.request_id]), True

    def _rank(self, request: Any, view: RequestView) -> tuple[int, int]:
        try:
            return self._policy.rank(view)
        except Exception as error:
            raise RankError(request.request_id) from error

    def _view(self, request: Any) -> RequestView:
        state = self._router.get(request.request_id)
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
        )


class ArrivalOrder:
    """Makes vLLM's priority policy preempt by our order among requests of equal priority.

    Load-bearing: under ``--scheduling-policy priority`` the victim is the running request with
    the greatest ``(priority, arrival_time)``, wherever it stands. For the length of one step the
    arrival times of the running requests follow their order.
    """

    def __init__(self, running: list[Any]) -> None:
        self._arrivals = [(request, request.arrival_time) for request in running]
        earliest = min((arrival for _, arrival in self._arrivals), default=0.0)
        for place, (request, _) in enumerate(self._arrivals):
            request.arrival_time = earliest + place * 1e-6

    def restore(self, waiting: Any) -> None:
        """Give back the true arrival times; preempted requests move to their true places."""
        for request, arrival in self._arrivals:
            request.arrival_time = arrival
        queued = set(waiting)
        for request, _ in self._arrivals:
            if request in queued:
                waiting.remove_request(request)
                waiting.add_request(request)
