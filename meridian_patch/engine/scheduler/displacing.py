"""Preempts thinkers for waiting requests of lower levels, and places them in the queue."""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, filterfalse, islice, takewhile
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

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
from meridian_patch.engine.scheduler.refusals import Refusals
from meridian_patch.engine.scheduler.waiting_order import WaitingOrder, first
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.levels import Levels
from meridian_patch.policy.time_sharing import choose_thinkers

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

# Bounds that keep the cost of a step independent of how many requests wait.
_REFRESH_STEPS = 8
_MOST_AGED = 8
_MOST_PASSED = 8
_MOST_MOVED = 32
# A new request that others overtake waits for so many times `aging_s` before it goes first: where
# long prompts went first sooner, every request waited longer.
_PATIENCE = 10
# Load-bearing: one with a grammar has the second status until upstream looks at it.
_NEW = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
# A thinker that was preempted makes room again after such a part of a level.
_TURNS_PER_LEVEL = 4
# So often at most others make room for a request that waits: running ones may take the room first.
_MOST_TIMES = 3


class Displacing:
    """Makes room for the waiting request that comes first, at the cost of longer thinkers.

    Args:
        waiting_order: the order of the scheduler's waiting queue.
        tracker: phases of all requests.
        aging_s: a preempted request that has waited this long goes before all others (the longest
            waiting first), and thinkers of any level are preempted for it. A new one with a long
            prompt goes before those that came later after ``_PATIENCE`` times as long.
        levels: the levels of requests.

    Attributes:
        skips_adapter: the next step leaves out a request with a LoRA adapter.
    """

    def __init__(
        self,
        waiting_order: WaitingOrder,
        tracker: PhaseTracker,
        aging_s: float,
        levels: Levels,
    ) -> None:
        self._waiting_order = waiting_order
        self._tracker = tracker
        self._aging_s = aging_s
        self._levels = levels
        # New requests with long prompts, and when they arrived; the oldest first. Some have begun.
        self._overtaken: dict[Any, float] = {}
        # Preempted requests that wait, and the time of their preemption; the oldest first.
        self._away: dict[Any, float] = {}
        # Preempted thinkers that still stand at the front, where upstream put them.
        self._to_place: dict[Any, None] = {}
        # Those whose level may have changed while they wait.
        self._to_move: dict[Any, None] = {}
        # Think tokens before which a thinker that was preempted makes no room again.
        self._safe_until: dict[Any, int] = {}
        # Thinkers that are left out of a step and make room after it, for which request, and since
        # which step.
        self._held: list[Any] = []
        self._held_for: Any | None = None
        self._held_at = 0
        # Requests for which others were preempted, their own number of preemptions then, and how
        # often that was since.
        self._made_room: dict[Any, tuple[int, int]] = {}
        self.refusals = Refusals()
        # The request for which no room was found, and before which step that is the answer.
        self._no_room_for: Any | None = None
        self._no_room_until = 0
        # Whether the next step leaves out a request with a LoRA adapter.
        self.skips_adapter = False
        # What is noted of requests.
        self._notes: tuple[dict[Any, Any], ...] = (
            self._away,
            self._overtaken,
            self._to_place,
            self._safe_until,
            self._made_room,
            self._to_move,
        )

    def on_removed(self, request: Request) -> None:
        """Forget a request that left the scheduler; its blocks are free now."""
        for notes in self._notes:
            notes.pop(request, None)
        if request in self._held:
            self._held.remove(request)
        if request is self._held_for:
            self._held, self._held_for = [], None
        self.refusals.forget(request)
        self._no_room_for = None

    def added(self, request: Request, level: int, now_s: float) -> None:
        """Note a new request; one with a long prompt waits behind later ones, but not for ever."""
        if level:
            self._overtaken[request] = now_s

    def preempted(self, request: Request, now_s: float) -> None:
        """Note that a thinker or a prompt was preempted, by upstream or by this class."""
        self._away.pop(request, None)
        self._away[request] = now_s
        self._to_place[request] = None
        # What is computed again has to bring it further, or newcomers may keep it where it is.
        self._make_safe_for(request, self._levels.first_tokens // _TURNS_PER_LEVEL)

    def levels_changed(self) -> None:
        """Note that levels are one now, or no longer: preempted requests get new places."""
        self._to_move.update(dict.fromkeys(self._away))

    def begun(self, request: Request) -> None:
        """Note that a request is in a step: no other overtakes it any more."""
        self._overtaken.pop(request, None)

    def ends_turn(self, session: Request) -> None:
        """Forget what was noted of a session: its next thought begins anew."""
        for notes in self._notes:
            notes.pop(session, None)

    def order_waiting(self, scheduler: "Scheduler", now_s: float) -> None:
        """Put preempted thinkers at their levels, and those that waited for ``aging_s`` first.

        Of these the longest waiting goes first.
        """
        moved = list(islice(self._to_move, _MOST_MOVED))
        for request in chain(self._to_place, moved):
            if request.status == RequestStatus.PREEMPTED:
                self._put_at_level(scheduler, request)
            self._to_move.pop(request, None)
        self._to_place.clear()
        to_front = [*self._take_aged(now_s), *self._take_late(scheduler, now_s)]
        if to_front:
            self._waiting_order.bring_forward(to_front, scheduler.waiting)

    def _take_aged(self, now_s: float) -> list[Any]:
        """Preempted requests that go first; each then thinks for a level before it makes room."""
        found = []
        aged = takewhile(lambda one: self._is_aged(one, now_s), self._away)
        for request in list(islice(aged, _MOST_AGED)):
            if request.status == RequestStatus.PREEMPTED:
                self._make_safe_for(request, self._levels.first_tokens)
                found.append(request)
            elif request.status == RequestStatus.RUNNING:
                del self._away[request]
        return found

    def _take_late(self, scheduler: "Scheduler", now_s: float) -> list[Any]:
        """New requests that others have overtaken for too long.

        Not before those of lower levels that came earlier, and wait even longer.
        """
        if not self._overtaken:
            return []
        # Load-bearing: the requests that upstream has skipped, and not admitted since.
        passed_over = scheduler.deferred_waiting
        next_s = self._waiting_order.next_arrival_s(scheduler.waiting, passed_over)
        limit_s = min(now_s - _PATIENCE * self._aging_s, next_s)
        late = takewhile(lambda one: self._overtaken[one] <= limit_s, self._overtaken)
        ready = (one for one in late if one.status in _NEW)
        return list(islice(ready, _MOST_AGED))

    @property
    def has_overtaken(self) -> bool:
        """Whether a new request may stand behind later ones."""
        return bool(self._overtaken)

    def found_no_room(self, scheduler: "Scheduler") -> bool:
        """Whether the request that comes first had no room a few steps ago, and has none now."""
        request = self._no_room_for
        if request is None or scheduler.current_step >= self._no_room_until:
            return False
        if not scheduler.waiting or scheduler.waiting.peek_request() is not request:
            return False
        return lacks_seat(scheduler) or self.refusals.num_missing(request) > 0

    def make_room(
        self, scheduler: "Scheduler", now_s: float, token_budget: int | None, decode_tokens: int
    ) -> None:
        """Preempt thinkers of higher levels if the request that comes first lacks room.

        Args:
            scheduler: the phase-aware scheduler.
            now_s: time of the monotonic clock.
            token_budget: tokens that the next step may compute; None: the engine's own limit.
            decode_tokens: tokens that the next step decodes.
        """
        self.skips_adapter = False
        if not scheduler.waiting:
            self._held.clear()
        # Load-bearing: a paused scheduler admits no request, so none is preempted for one.
        if not scheduler.waiting or scheduler._pause_state != PauseState.UNPAUSED:
            self._no_room_for = None
            return
        if self.found_no_room(scheduler):
            return
        self._no_room_for = None
        most = scheduler.max_num_scheduled_tokens if token_budget is None else token_budget
        newcomer = self._in_line(scheduler, int(most) - decode_tokens)
        if newcomer is None:
            return
        if newcomer is not self._held_for:
            self._held, self._held_for = [], newcomer
        # A request that was not admitted after others made room for it lacks something else.
        is_hopeless = self._times_made_room(newcomer) >= _MOST_TIMES
        if is_hopeless or not self._preempt_for(scheduler, newcomer, now_s, token_budget):
            self._no_room_for = newcomer
            self._no_room_until = scheduler.current_step + _REFRESH_STEPS

    def _in_line(self, scheduler: "Scheduler", tokens_left: int) -> Any | None:
        """The waiting request that lacks a seat, or was refused blocks; None: it is not known.

        At the limit of running requests upstream asks for no blocks. Below it, it has asked for the
        first request that it did not skip; if another stands before that now, it is asked first.
        """
        if lacks_seat(scheduler):
            return takes_seat(scheduler, tokens_left)
        for request in first(scheduler.waiting, MOST_LOOKED_AT):
            if request is self.refusals.last:
                return request
            # Load-bearing: the requests that upstream has skipped, and not admitted since.
            if request not in scheduler.deferred_waiting:
                return None
        return None

    def _preempt_for(
        self, scheduler: "Scheduler", newcomer: Request, now_s: float, token_budget: int | None
    ) -> bool:
        """Preempt thinkers for a newcomer that lacks blocks or a seat, if enough may be displaced.

        Where it is admitted some steps after the preemption only, what running requests take until
        then is missing, too.

        A thinker whose last token is in flight may have ended its thought with it. It is left out
        of the next step instead, and preempted in a later one, unless it answers by then.

        Returns:
            Whether the request that comes first fits now, or the next step must decide.
        """
        missing = self.refusals.num_missing(newcomer)
        if lacks_seat(scheduler):
            # Upstream has not asked for its blocks yet.
            free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            missing = max(missing, whole_blocks(scheduler, newcomer) - free)
        elif missing <= 0:
            # Upstream finds out; if it does not fit, it lacks blocks in the next step.
            return True
        if missing > 0:
            missing += taken_blocks(scheduler, token_budget, num_steps_until_admitted(scheduler))
        manager, prefix = scheduler.kv_cache_manager, self.refusals.prefix_of(newcomer)
        chosen = choose_thinkers(
            self._thinkers(scheduler, newcomer, now_s),
            missing,
            lambda thinker: freed_blocks(manager, thinker.request_id, prefix),
        )
        if not chosen:
            return False
        if self._are_held(scheduler, chosen):
            return True
        self._preempt(scheduler, chosen)
        self._held = []
        self._made_room[newcomer] = newcomer.num_preemptions, self._times_made_room(newcomer) + 1
        if self._is_owed(newcomer, now_s):
            # Before those of its own level, too, that made room for it.
            self._waiting_order.bring_forward([newcomer], scheduler.waiting)
        return True

    def _are_held(self, scheduler: "Scheduler", requests: list[Request]) -> bool:
        """Hold these requests for a step if tokens of any are on their way.

        Not once they were held while as many steps were scheduled as may be in flight: between two
        steps that may compute prompts others ran, and put new tokens on their way.
        """
        if not any(request.num_in_flight_tokens for request in requests):
            return False
        step = scheduler.current_step
        if not set(requests) <= set(self._held):
            self._held, self._held_at = requests, step
        elif step - self._held_at >= scheduler.vllm_config.max_concurrent_batches:
            return False
        miscounts = miscounts_adapters(scheduler)
        for request in requests:
            self.skips_adapter |= miscounts and request.lora_request is not None
            # Load-bearing: `schedule()` first counts the step, and then leaves out each running
            # request that is eligible in a later step only.
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, step + 2)
        return True

    def _preempt(self, scheduler: "Scheduler", requests: list[Request]) -> None:
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
            self._put_at_level(scheduler, request)

    def _thinkers(self, scheduler: "Scheduler", newcomer: Request, now_s: float) -> Iterator[Any]:
        """Thinkers of higher levels than a request's, in the order in which they make room.

        First come those that were held for a step, then the highest levels. Requests that answer,
        or have aged, may displace thinkers of any level.

        A LoRA adapter leaves with its last request. Where one may wait for that before the
        newcomer, it would take the room, and may need more of it: the last one stays then.
        """
        holders = self._adapters_to_keep(scheduler, newcomer)
        level = -1 if self._is_owed(newcomer, now_s) else self._level(newcomer)
        is_answer = self._is_answer(newcomer)
        held = [one for one in self._held if one.status == RequestStatus.RUNNING]
        num_passed, priority, done = 0, None, None
        # The order of service puts the highest levels last, but for some that were not ranked yet.
        for request in chain(held, filterfalse(held.__contains__, reversed(scheduler.running))):
            if request.priority == done:
                continue
            state = self._tracker.get(request.request_id)
            if state is None or state.phase is not Phase.THINK or request.is_prefill_chunk:
                continue
            attained = state.think_tokens
            if self._levels.of(attained) <= level:
                # Priorities go before levels.
                num_passed = num_passed + 1 if request.priority == priority else 1
                priority = request.priority
                if num_passed == _MOST_PASSED:
                    done = priority
                continue
            is_safe = attained < self._safe_until.get(request, 0)
            if (is_safe and not is_answer) or request.priority < newcomer.priority:
                continue
            if holders and request.lora_request:
                adapter = request.lora_request.lora_int_id
                if holders[adapter] == 1:
                    continue
                holders[adapter] -= 1
            yield request

    def _adapters_to_keep(self, scheduler: "Scheduler", newcomer: Request) -> Counter[int]:
        """Running requests by LoRA adapter, if one with an adapter waits before the newcomer."""
        waiting = first(scheduler.waiting, MOST_LOOKED_AT) if scheduler.lora_config else []
        before = takewhile(lambda one: one is not newcomer, waiting)
        if not any(one.lora_request for one in before):
            return Counter()
        users = (one.lora_request for one in scheduler.running if one.lora_request)
        return Counter(each.lora_int_id for each in users)

    def _times_made_room(self, request: Request) -> int:
        """How often others made room for a request since it waits."""
        since, times = self._made_room.get(request, (0, 0))
        return times if since == request.num_preemptions else 0

    def _make_safe_for(self, request: Request, tokens: int) -> None:
        """Let a request make room only when it has thought for so many more tokens."""
        until = self._attained(request) + tokens
        self._safe_until[request] = max(until, self._safe_until.get(request, 0))

    def _put_at_level(self, scheduler: "Scheduler", request: Request) -> None:
        state = self._tracker.get(request.request_id)
        # Preempted answers are brought forward; other requests without a thought keep their place.
        if state is not None and state.phase is not Phase.ANSWER:
            self._waiting_order.put_at_level(request, self._level(request), scheduler.waiting)

    def _level(self, request: Request) -> int:
        return self._levels.of(self._attained(request), request.num_prompt_tokens)

    def _attained(self, request: Request) -> int:
        state = self._tracker.get(request.request_id)
        return state.think_tokens if state else 0

    def _is_owed(self, request: Request, now_s: float) -> bool:
        """Whether any thinker makes room for a request."""
        return self._is_answer(request) or self._is_aged(request, now_s)

    def _is_answer(self, request: Request) -> bool:
        state = self._tracker.get(request.request_id)
        return state is not None and state.phase is Phase.ANSWER

    def _is_aged(self, request: Request, now_s: float) -> bool:
        return now_s - self._away.get(request, now_s) >= self._aging_s
