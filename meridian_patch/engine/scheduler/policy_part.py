"""Applies the policy before each step: its limits, and the order of the running requests."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from meridian_patch.config.policy import PolicyRules
from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.engine.scheduler.running_order import ArrivalOrder, RunningOrder
from meridian_patch.engine.scheduler.step_limits import StepLimiter, StepLimits
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import Fallback, PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

_UNLIMITED = StepLimits()


class PolicyPart(SchedulerPart):
    """Arranges the scheduler's queues before each step.

    Args:
        scheduler: the phase-aware scheduler.
        rules: the rules that are on.
        limiter: computes the limits of each step.
        order: orders the running requests.
        tracker: phases of all requests.
        phase_counters: counts preemptions and slow plans.
        time_budget_us: a plan that takes longer is counted as a slow fallback.
    """

    name = counters.POLICY

    def __init__(
        self,
        scheduler: "Scheduler",
        rules: PolicyRules,
        limiter: StepLimiter,
        order: RunningOrder,
        tracker: PhaseTracker,
        phase_counters: PhaseCounters,
        time_budget_us: int,
    ) -> None:
        self.rules = rules
        self.limiter = limiter
        self.order = order
        # Preempted answers that have not resumed yet.
        self.waiting_answers: dict[str, Any] = {}
        self.time_budget_s = time_budget_us * 1e-6
        self._scheduler = scheduler
        self._tracker = tracker
        self._counters = phase_counters
        # What the policy planned for the next step.
        self._planned = _UNLIMITED
        # Whether a decision of this step took too long.
        self._is_slow = False
        # Tokens that were computed when a request was preempted, by id, until it resumes.
        self._lost_tokens: dict[str, int] = {}
        # Time of the policy since the last report, by stage.
        self._spent_s = {"limits": 0.0, "order": 0.0}
        self._num_kv_groups = len(scheduler.kv_cache_config.kv_cache_groups)

    def before_added(self, request: Request, options: RequestOptions) -> None:
        self.limiter.before_added(request, options, self._scheduler.policy)

    def on_added(self, request: Request, options: RequestOptions) -> None:
        self.limiter.on_added(request, self._scheduler.waiting)

    def on_session_continued(self, session: Request, options: RequestOptions) -> None:
        self.limiter.goes_on(session)

    def on_turn_ended(self, session: Request) -> None:
        self.limiter.pauses(session)
        self.order.forget(session)
        self.waiting_answers.pop(session.request_id, None)

    def on_freed(self, request: Request) -> None:
        self.order.forget(request)
        self.waiting_answers.pop(request.request_id, None)
        self._lost_tokens.pop(request.request_id, None)
        self.limiter.on_removed(request)

    def on_probe_freed(self, probe: Request) -> None:
        self.order.forget(probe)

    def on_probe_preempted(self, probe: Request) -> None:
        self.order.forget(probe)

    def on_phase_changed(self, request: Request) -> None:
        self.order.changed(request)
        # The request was preempted while its end boundary was in flight.
        if request.status == RequestStatus.PREEMPTED and self._phase(request) is Phase.ANSWER:
            self.waiting_answers[request.request_id] = request
        self.limiter.changed(request)

    def before_preempted(self, request: Request) -> None:
        # Upstream sets it to 0. Tokens that are not computed yet are not lost.
        self._lost_tokens[request.request_id] = request.num_computed_tokens

    def on_preempted(self, request: Request) -> None:
        phase = self._phase(request)
        self._counters.count(counters.PREEMPTION, phase)
        self.order.forget(request)
        is_answer = phase is Phase.ANSWER
        if is_answer:
            self.waiting_answers[request.request_id] = request
        self.limiter.preempted(request, is_answer=is_answer)

    def before_schedule(self, plan: StepPlan) -> None:
        self._planned = _UNLIMITED
        self._is_slow = False
        try:
            if not self.rules.are_all_off:
                self._arrange(plan)
        finally:
            # A probe is a prompt to upstream, too.
            plan.may_probe = (
                plan.may_prefill and not self.waiting_answers and not self.limiter.makes_room
            )
            if self._is_slow:
                self._counters.count(counters.FALLBACK, Fallback.SLOW)

    def after_schedule(self, output: Any, started: Sequence[str]) -> None:
        for request_id in started:
            self.waiting_answers.pop(request_id, None)
            self._count_recomputed(request_id, output)
        if not self.rules.are_all_off:
            # Every step must be noted: the time of one that is not cannot be learnt.
            self.limiter.scheduled(self._scheduler, output, started)
            self._count_limited()

    def before_update(self, scheduler_output: Any, model_output: Any) -> None:
        self.limiter.ended(scheduler_output)

    def before_stats(self) -> None:
        if self.limiter.report_steps(self._counters):
            for stage, seconds in self._spent_s.items():
                self._counters.spend(counters.POLICY_SECONDS, stage, seconds)
                self._spent_s[stage] = 0.0

    def on_switched_off(self) -> None:
        self.limiter.refusals = None
        # Their ends are not reported to this part any more.
        for request in self._scheduler.requests.values():
            self.on_freed(request)

    def is_uncontended(self) -> bool:
        """True if the next step only decodes, with room for all: order is then irrelevant."""
        scheduler = self._scheduler
        if self.waiting_answers or self.order.has_prefilling:
            return False
        if self.limiter.may_prefill(scheduler):
            return False
        probes = self.limiter.probes
        if probes and probes.are_next:
            return False
        # Load-bearing: a decode also takes tokens for its drafts, and no more blocks than these.
        rows, drafts = len(scheduler.running), scheduler.num_spec_tokens
        blocks = rows * self._num_kv_groups * (2 + 2 * drafts // scheduler.block_size)
        is_roomy = blocks <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return is_roomy and rows * (1 + drafts) <= scheduler.max_num_scheduled_tokens

    def _arrange(self, plan: StepPlan) -> None:
        if self.limiter.is_stock or self.is_uncontended():
            self.limiter.decodes(self._scheduler)
            self.limiter.count_cadence(may_prefill=plan.may_prefill)
        else:
            plan.token_budget, most = self._planned = self._limits(may_prefill=plan.may_prefill)
            if most is not None:
                plan.limit_active(most)
            if self.rules.order:
                plan.arrivals = self.order_running()

    def _limits(self, *, may_prefill: bool) -> StepLimits:
        """Limits of the next step; they apply even if computing them took too long.

        The time is already spent by then, and on a busy machine a step without limits would take
        longer still.
        """
        started_s = time.perf_counter()
        answers = self.waiting_answers.values() if self.rules.order else ()
        limits = self.limiter.plan(self._scheduler, answers, may_prefill=may_prefill)
        spent_s = time.perf_counter() - started_s
        self._spent_s["limits"] += spent_s
        self._is_slow |= spent_s > self.time_budget_s
        return limits

    def order_running(self) -> ArrivalOrder | None:
        """Put the running requests in the policy's order."""
        scheduler = self._scheduler
        # Load-bearing: the order of `running` affects only which requests get tokens first and
        # which is preempted (the last, under FCFS), in the scheduler and in the model runner.
        started_s = time.perf_counter()
        scheduler.running, is_in_time = self.order.arrange(scheduler.running)
        self._spent_s["order"] += time.perf_counter() - started_s
        self._is_slow |= not is_in_time
        if scheduler.policy == SchedulingPolicy.PRIORITY:
            return ArrivalOrder(scheduler.running)
        return None

    def _count_recomputed(self, request_id: str, output: Any) -> None:
        """Count the tokens that a request which resumes computes again."""
        lost = self._lost_tokens.pop(request_id, None)
        if lost is None:
            return
        request = self._scheduler.requests[request_id]
        # Load-bearing: the scheduled tokens already count as computed; the others are cached.
        cached = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
        # Of tokens in flight, those that were not accepted are no tokens of the request.
        again = min(lost, request.num_tokens) - cached
        if again > 0:
            self._counters.count(counters.RECOMPUTED, self._phase(request), again)

    def _count_limited(self) -> None:
        """Count the limits of the step just scheduled that left work out of it."""
        scheduler, most = self._scheduler, self._planned.max_active
        if self.limiter.left_out:
            self._counters.count(counters.LIMITED, "tokens")
        if most is None or most >= scheduler.max_num_active_reqs or not scheduler.waiting:
            return
        if len(scheduler.running) >= most:
            self._counters.count(counters.LIMITED, "requests")

    def _phase(self, request: Request) -> Phase:
        state = self._tracker.get(request.request_id)
        return state.phase if state else Phase.ANSWER
