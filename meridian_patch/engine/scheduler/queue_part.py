"""Decides where requests wait: by level, priority and time, aged and late ones first."""

from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from meridian_patch.config.policy import PolicyRules
from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine.request_state import FRONT, RequestState, RequestStates
from meridian_patch.engine.scheduler.attained_service import AttainedService, StockSteps
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.engine.scheduler.waiting_order import WaitingOrder
from meridian_patch.telemetry import counters

if TYPE_CHECKING:
    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

# Bounds that keep the cost of a step independent of how many requests wait.
_MOST_AGED = 8
_MOST_MOVED = 32
# A new request that others overtake waits for so many times `aging_s` before it goes first: where
# long prompts went first sooner, every request waited longer.
_PATIENCE = 10
# Load-bearing: one with a grammar has the second status until upstream looks at it.
_NEW = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
# A thinker that was preempted makes room again after such a part of a level.
_TURNS_PER_LEVEL = 4


class QueuePart(SchedulerPart):
    """Decides where new and preempted requests wait.

    Under the rule ``time_sharing`` levels count. A preempted request that has waited for
    ``aging_s`` then goes before all others, the longest waiting first. A new one with a long prompt
    goes before those that came later after ``_PATIENCE`` times as long.

    Args:
        scheduler: the phase-aware scheduler.
        rules: the rules that are on.
        states: records of all requests.
        stock_steps: when all is done as in stock.
        waiting_order: places requests in the queue.
        service: levels of requests.
    """

    name = counters.POLICY

    def __init__(
        self,
        scheduler: "PhaseScheduling",
        rules: PolicyRules,
        states: RequestStates,
        stock_steps: StockSteps,
        waiting_order: WaitingOrder,
        service: AttainedService,
    ) -> None:
        self._scheduler = scheduler
        self._rules = rules
        self._states = states
        self._stock_steps = stock_steps
        self._waiting_order = waiting_order
        self._service = service
        # As it was before the last step.
        self._is_answered_elsewhere = False

    def before_added(self, request: Request, options: RequestOptions) -> None:
        if not self._rules.order:
            return
        state = self._states.of(request)
        # Load-bearing: upstream reads priorities only under its priority policy. Otherwise only
        # `meridian_priority` counts, which operators may allow or not.
        own = request.priority if self._scheduler.policy == SchedulingPolicy.PRIORITY else 0
        # A session's next chunk does not inherit the `meridian_priority` of the one before.
        request.priority = own if state.own_priority is None else state.own_priority
        state.own_priority = None
        if options.meridian_priority and not self._stock_steps.are_all:
            state.own_priority = request.priority
            request.priority = options.meridian_priority

    def on_added(self, request: Request, options: RequestOptions) -> None:
        state, states = self._states.of(request), self._states
        has_priority = self._rules.order and not self._stock_steps.are_all
        priority = options.meridian_priority if has_priority else 0
        level, now_s = 0, self._scheduler.clock()
        elsewhere = self._is_answered_elsewhere
        is_stock = self._stock_steps.is_next(is_answered_elsewhere=elsewhere)
        if self._rules.time_sharing and not is_stock:
            level = self._service.level_of_prompt(request)
            if level:
                # It waits behind later ones, but not for ever.
                state.overtaken_s = now_s
                states.overtaken[state] = None
        self._waiting_order.place_new(state, self._scheduler.waiting, level, priority, now_s)

    def on_session_continued(self, session: Request, options: RequestOptions) -> None:
        # Without KV blocks it waits at the front.
        self._states.of(session).place = FRONT

    def on_preempted(self, request: Request) -> None:
        state, states = self._states.of(request), self._states
        state.place = FRONT
        if not self._rules.time_sharing or self._service.is_answering(request):
            return
        states.away.pop(state, None)
        states.away[state] = states.to_place[state] = None
        state.away_s = self._scheduler.clock()
        # What is computed again has to bring it further, or newcomers may keep it where it is.
        self._service.make_safe(state, self._service.first_tokens // _TURNS_PER_LEVEL)

    def before_schedule(self, plan: StepPlan) -> None:
        self._is_answered_elsewhere = plan.is_answered_elsewhere
        if not plan.is_contended:
            return
        if self._rules.time_sharing:
            self._order_waiting(plan.now_s)
        if plan.num_answers_waiting:
            answers = self._states.waiting_answers
            preempted = [one for one in answers if one.request.status == RequestStatus.PREEMPTED]
            self._waiting_order.bring_forward(preempted, self._scheduler.waiting)

    def _order_waiting(self, now_s: float) -> None:
        """Put preempted thinkers at their levels, and those that waited too long first.

        Of these the longest waiting goes first.
        """
        states, waiting = self._states, self._scheduler.waiting
        moved = list(islice(states.to_move, _MOST_MOVED))
        for state in chain(states.to_place, moved):
            if state.request.status == RequestStatus.PREEMPTED:
                level = self._service.level_in_queue(state.request)
                if level is not None:
                    self._waiting_order.put_at_level(state, level, waiting)
            states.to_move.pop(state, None)
        states.to_place.clear()
        to_front = [*self._take_aged(now_s), *self._take_late(now_s)]
        if to_front:
            self._waiting_order.bring_forward(to_front, waiting)

    def _take_aged(self, now_s: float) -> list[RequestState]:
        """Preempted requests that go first; each then thinks for a level before it makes room."""
        found, away = [], self._states.away
        aged = takewhile(lambda one: self._service.is_aged(one, now_s), away)
        for state in list(islice(aged, _MOST_AGED)):
            if state.request.status == RequestStatus.PREEMPTED:
                self._service.make_safe(state, self._service.first_tokens)
                found.append(state)
            elif state.request.status == RequestStatus.RUNNING:
                del away[state]
        return found

    def _take_late(self, now_s: float) -> list[RequestState]:
        """New requests that others have overtaken for too long.

        Not before those of lower levels that came earlier, and wait even longer.
        """
        overtaken, scheduler = self._states.overtaken, self._scheduler
        if not overtaken:
            return []
        # Load-bearing: the requests that upstream has skipped, and not admitted since.
        passed_over = scheduler.deferred_waiting
        next_s = self._waiting_order.next_arrival_s(scheduler.waiting, passed_over)
        limit_s = min(now_s - _PATIENCE * self._service.aging_s, next_s)
        late = takewhile(lambda one: one.overtaken_s <= limit_s, overtaken)
        ready = (one for one in late if one.request.status in _NEW)
        return list(islice(ready, _MOST_AGED))
