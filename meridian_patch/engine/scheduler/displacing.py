"""Preempts thinkers for waiting requests of lower levels."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, filterfalse, takewhile
from typing import TYPE_CHECKING

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine.request_state import RequestState, RequestStates
from meridian_patch.engine.scheduler.admission_checks import (
    MOST_LOOKED_AT,
    freed_blocks,
    lacks_seat,
    miscounts_adapters,
    num_steps_until_admitted,
    taken_blocks,
    takes_seat,
    whole_blocks,
)
from meridian_patch.engine.scheduler.attained_service import AttainedService
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.engine.scheduler.refusals import Refusals
from meridian_patch.engine.scheduler.step_load import StepLoad
from meridian_patch.engine.scheduler.waiting_order import WaitingOrder, first
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.time_sharing import choose_thinkers
from meridian_patch.telemetry import counters

if TYPE_CHECKING:
    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

# Bounds that keep the cost of a step independent of how many requests wait.
_REFRESH_STEPS = 8
_MOST_PASSED = 8
# So often at most others make room for a request that waits: running ones may take the room first.
_MOST_TIMES = 3


class Displacing(SchedulerPart):
    """Makes room for the waiting request that comes first, at the cost of longer thinkers.

    Args:
        scheduler: the phase-aware scheduler.
        states: records of all requests.
        tracker: phases of all requests.
        waiting_order: places requests in the queue.
        service: levels of requests.
        refusals: what upstream refuses while it admits requests.
        load: counts the tokens of steps.
    """

    name = counters.POLICY

    def __init__(
        self,
        scheduler: "PhaseScheduling",
        states: RequestStates,
        tracker: PhaseTracker,
        waiting_order: WaitingOrder,
        service: AttainedService,
        refusals: Refusals,
        load: StepLoad,
    ) -> None:
        self._scheduler = scheduler
        self._states = states
        self._tracker = tracker
        self._waiting_order = waiting_order
        self._service = service
        self._refusals = refusals
        self._load = load
        # For which request thinkers are held, and since which step.
        self._held_for: Request | None = None
        self._held_at = 0
        # Whether the next step leaves out a request with a LoRA adapter.
        self._skips_adapter = False

    def on_freed(self, request: Request) -> None:
        if request is self._held_for:
            self._states.held.clear()
            self._held_for = None
        # Its blocks will be free.
        self._refusals.forget(request)
        self._refusals.look_again()

    def before_schedule(self, plan: StepPlan) -> None:
        if not (plan.is_contended and plan.may_admit):
            return
        if plan.is_cut and not plan.prefill_tokens:
            # The room would be used in a later step, and answers would take some of it.
            return
        scheduler = self._scheduler
        rows = len(scheduler.running)
        self.make_room(plan)
        if self._skips_adapter:
            # No other adapter may come in beside one that is left out.
            plan.max_active = 0
        if len(scheduler.running) < rows:
            shape = self._load.decodes()
            if plan.token_budget is not None:
                # A prompt gets no longer chunk: it would need more blocks than were made free.
                plan.token_budget = shape.decode_tokens + plan.prefill_tokens
            plan.shape = shape
            plan.may_probe = False
            if scheduler.connector or scheduler.aux_output_connector:
                # Load-bearing: connectors do not expect a request that was preempted in a step to
                # load or run in it. The room is used in the next one, unless this is empty.
                plan.max_active = 0 if scheduler.running else 1

    def on_switched_off(self) -> None:
        self._held_for = None

    def make_room(self, plan: StepPlan) -> None:
        """Preempt thinkers of higher levels if the request that comes first lacks room."""
        scheduler, refusals = self._scheduler, self._refusals
        self._skips_adapter = False
        if not scheduler.waiting:
            self._states.held.clear()
        # Load-bearing: a paused scheduler admits no request, so none is preempted for one.
        if not scheduler.waiting or scheduler._pause_state != PauseState.UNPAUSED:
            refusals.look_again()
            return
        if refusals.found_no_room(scheduler):
            return
        refusals.look_again()
        budget, most = plan.token_budget, scheduler.max_num_scheduled_tokens
        most = most if budget is None else budget
        newcomer = self._in_line(int(most) - plan.shape.decode_tokens)
        if newcomer is None:
            return
        if newcomer is not self._held_for:
            self._states.held.clear()
            self._held_for = newcomer
        # A request that was not admitted after others made room for it lacks something else.
        state = self._states.of(newcomer)
        is_hopeless = _times_made_room(state) >= _MOST_TIMES
        if is_hopeless or not self._preempt_for(state, plan):
            refusals.give_up(newcomer, scheduler.current_step + _REFRESH_STEPS)

    def _in_line(self, tokens_left: int) -> Request | None:
        """The waiting request that lacks a seat, or was refused blocks; None: it is not known.

        At the limit of running requests upstream asks for no blocks. Below it, it has asked for the
        first request that it did not skip; if another stands before that now, it is asked first.
        """
        scheduler = self._scheduler
        if lacks_seat(scheduler):
            return takes_seat(scheduler, tokens_left)
        for request in first(scheduler.waiting, MOST_LOOKED_AT):
            if request is self._refusals.last:
                return request
            # Load-bearing: the requests that upstream has skipped, and not admitted since.
            if request not in scheduler.deferred_waiting:
                return None
        return None

    def _preempt_for(self, state: RequestState, plan: StepPlan) -> bool:
        """Preempt thinkers for a newcomer that lacks blocks or a seat, if enough may be displaced.

        Where it is admitted some steps after the preemption only, what running requests take until
        then is missing, too.

        A thinker whose last token is in flight may have ended its thought with it. It is left out
        of the next step instead, and preempted in a later one, unless it answers by then.

        Returns:
            Whether the request that comes first fits now, or the next step must decide.
        """
        scheduler, newcomer = self._scheduler, state.request
        missing = self._refusals.num_missing(newcomer)
        if lacks_seat(scheduler):
            # Upstream has not asked for its blocks yet.
            free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            missing = max(missing, whole_blocks(scheduler, newcomer) - free)
        elif missing <= 0:
            # Upstream finds out; if it does not fit, it lacks blocks in the next step.
            return True
        if missing > 0:
            num_later = num_steps_until_admitted(scheduler)
            missing += taken_blocks(scheduler, plan.token_budget, num_later)
        manager, prefix = scheduler.kv_cache_manager, self._refusals.prefix_of(newcomer)
        is_owed = self._is_answer(newcomer) or self._service.is_aged(state, plan.now_s)
        chosen = choose_thinkers(
            self._thinkers(newcomer, is_owed=is_owed),
            missing,
            lambda thinker: freed_blocks(manager, thinker.request_id, prefix),
        )
        if not chosen:
            return False
        if self._are_held(chosen):
            return True
        self._preempt(chosen)
        self._states.held.clear()
        state.room_made = newcomer.num_preemptions, _times_made_room(state) + 1
        if is_owed:
            # Before those of its own level, too, that made room for it.
            self._waiting_order.bring_forward([state], scheduler.waiting)
        return True

    def _are_held(self, requests: Sequence[Request]) -> bool:
        """Hold these requests for a step if tokens of any are on their way.

        Not once they were held while as many steps were scheduled as may be in flight: between two
        steps that may compute prompts others ran, and put new tokens on their way.
        """
        if not any(request.num_in_flight_tokens for request in requests):
            return False
        scheduler, held = self._scheduler, self._states.held
        step, chosen = scheduler.current_step, dict.fromkeys(map(self._states.of, requests))
        if not chosen.keys() <= held.keys():
            held.clear()
            held.update(chosen)
            self._held_at = step
        elif step - self._held_at >= scheduler.vllm_config.max_concurrent_batches:
            return False
        miscounts = miscounts_adapters(scheduler)
        for request in requests:
            self._skips_adapter |= miscounts and request.lora_request is not None
            # Load-bearing: `schedule()` first counts the step, and then leaves out each running
            # request that is eligible in a later step only.
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, step + 2)
        return True

    def _preempt(self, requests: Sequence[Request]) -> None:
        scheduler = self._scheduler
        for request in requests:
            scheduler.running.remove(request)
            # Load-bearing: the call by which upstream preempts; here it comes before the step.
            # Blocks that a step in flight writes, upstream frees when that step has ended.
            scheduler._preempt_request(
                request, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery
            )
            # Load-bearing: upstream does not send model runner V1 the token ids of requests in this
            # set, and a preempted request that resumes in the next step needs them.
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            level = self._service.level_in_queue(request)
            if level is not None:
                self._waiting_order.put_at_level(self._states.of(request), level, scheduler.waiting)

    def _thinkers(self, newcomer: Request, *, is_owed: bool) -> Iterator[Request]:
        """Thinkers of higher levels than a request's, in the order in which they make room.

        First come those that were held for a step, then the highest levels. Requests that answer,
        or have aged, may displace thinkers of any level.

        A LoRA adapter leaves with its last request. Where one may wait for that before the
        newcomer, it would take the room, and may need more of it: the last one stays then.
        """
        scheduler, holders = self._scheduler, self._adapters_to_keep(newcomer)
        level = -1 if is_owed else self._service.level(newcomer)
        is_answer = self._is_answer(newcomer)
        held = [one.request for one in self._states.held]
        held = [one for one in held if one.status == RequestStatus.RUNNING]
        num_passed, priority, done = 0, None, None
        # The order of service puts the highest levels last, but for some that were not ranked yet.
        for request in chain(held, filterfalse(held.__contains__, reversed(scheduler.running))):
            if request.priority == done:
                continue
            state = self._tracker.get(request.request_id)
            if state is None or state.phase is not Phase.THINK or request.is_prefill_chunk:
                continue
            attained = state.think_tokens
            if self._service.level_of_thought(attained) <= level:
                # Priorities go before levels.
                num_passed = num_passed + 1 if request.priority == priority else 1
                priority = request.priority
                if num_passed == _MOST_PASSED:
                    done = priority
                continue
            is_safe = attained < self._states.of(request).safe_tokens
            if (is_safe and not is_answer) or request.priority < newcomer.priority:
                continue
            if holders and request.lora_request:
                adapter = request.lora_request.lora_int_id
                if holders[adapter] == 1:
                    continue
                holders[adapter] -= 1
            yield request

    def _adapters_to_keep(self, newcomer: Request) -> Counter[int]:
        """Running requests by LoRA adapter, if one with an adapter waits before the newcomer."""
        scheduler = self._scheduler
        waiting = first(scheduler.waiting, MOST_LOOKED_AT) if scheduler.lora_config else []
        before = takewhile(lambda one: one is not newcomer, waiting)
        if not any(one.lora_request for one in before):
            return Counter()
        users = (one.lora_request for one in scheduler.running if one.lora_request)
        return Counter(each.lora_int_id for each in users)

    def _is_answer(self, request: Request) -> bool:
        state = self._tracker.get(request.request_id)
        return state is not None and state.phase is Phase.ANSWER


def _times_made_room(state: RequestState) -> int:
    """How often others made room for a request since it waits."""
    since, times = state.room_made
    return times if since == state.request.num_preemptions else 0
