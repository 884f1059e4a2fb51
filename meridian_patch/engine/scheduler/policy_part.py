"""Finds out whether requests compete for a step, and whether probes may be in it."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from vllm.v1.request import Request, RequestStatus

from meridian_patch.config.policy import PolicyRules
from meridian_patch.engine.request_state import RequestState, RequestStates
from meridian_patch.engine.scheduler.attained_service import StockSteps
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.engine.scheduler.refusals import Refusals
from meridian_patch.engine.scheduler.running_order import RunningOrder
from meridian_patch.engine.scheduler.step_load import StepLoad
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.step_time import StepTimeModel
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from meridian_patch.engine.early_exit.probes import Probes
    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling


# For so many steps probes that only observe wait for one with prompts: a few tenths of a second.
_MOST_WAITED_STEPS: Final = 32


class PolicyPart(SchedulerPart):
    """The first part of the policy: the others do nothing in steps for which no request competes.

    It also follows the requests that begin and those that are preempted.

    Args:
        scheduler: the phase-aware scheduler.
        rules: the rules that are on.
        states: records of all requests.
        tracker: phases of all requests.
        stock_steps: when all is done as in stock.
        load: counts the tokens of steps.
        order: the order of running requests.
        refusals: what upstream refuses while it admits requests.
        probes: probes of thoughts; None: none are made.
        model: predicts step times, and knows whether captured graphs run steps that only decode: a
            probe, a prompt to upstream, makes such a step longer than its tokens take.
        phase_counters: count preemptions, what is computed again, and steps with too few seats.
    """

    name = counters.POLICY

    def __init__(
        self,
        scheduler: "PhaseScheduling",
        rules: PolicyRules,
        states: RequestStates,
        tracker: PhaseTracker,
        stock_steps: StockSteps,
        load: StepLoad,
        order: RunningOrder,
        refusals: Refusals,
        probes: "Probes | None",
        model: StepTimeModel,
        phase_counters: PhaseCounters,
    ) -> None:
        self.rules = rules
        self._scheduler = scheduler
        self._states = states
        self._tracker = tracker
        self._stock_steps = stock_steps
        self._load = load
        self._order = order
        self._refusals = refusals
        self._probes = probes
        self._model = model
        # How long due probes have waited for prompts; 0: they do not wait.
        self._waited_steps = 0
        self._counters = phase_counters
        self._num_kv_groups = len(scheduler.kv_cache_config.kv_cache_groups)

    def on_phase_changed(self, request: Request) -> None:
        self._order.changed(request)
        # The request was preempted while its end boundary was in flight.
        if request.status == RequestStatus.PREEMPTED and self._phase(request) is Phase.ANSWER:
            self._states.waiting_answers[self._states.of(request)] = None

    def before_preempted(self, request: Request) -> None:
        # Upstream sets it to 0. Tokens that are not computed yet are not lost.
        self._states.of(request).lost_tokens = request.num_computed_tokens

    def on_preempted(self, request: Request) -> None:
        self._order.forget(request)
        phase, state = self._phase(request), self._states.of(request)
        self._counters.count(counters.PREEMPTION, phase)
        self._states.prefilling.pop(state, None)
        if phase is Phase.ANSWER:
            self._states.waiting_answers[state] = None

    def before_schedule(self, plan: StepPlan) -> None:
        states = self._states
        is_open = plan.may_prefill and not states.waiting_answers
        plan.may_probe = is_open and not self._do_probes_wait()
        if self.rules.are_all_off:
            return
        elsewhere = plan.is_answered_elsewhere
        is_stock = self._stock_steps.is_next(is_answered_elsewhere=elsewhere)
        if not is_stock and not self.is_uncontended():
            plan.is_contended = True
            plan.begun_s, plan.now_s = time.perf_counter(), self._scheduler.clock()
            plan.num_answers_waiting = len(states.waiting_answers) if self.rules.order else 0
        plan.shape = self._load.decodes()

    def after_schedule(
        self, plan: StepPlan, output: "SchedulerOutput", started: Sequence[str]
    ) -> None:
        for name in started:
            state = self._states.get(name)
            if state is not None:
                self._states.begin(state)
                self._count_recomputed(state, output)
        if self.rules.are_all_off:
            return
        plan.scheduled_s = self._scheduler.clock()
        # Every step must be noted: the time of one that is not cannot be learnt.
        plan.ran = self._load.of(output, plan.shape)
        scheduler, most = self._scheduler, plan.max_active
        # A limit that left requests out of the step.
        if most is None or most >= scheduler.max_num_active_reqs or not scheduler.waiting:
            return
        if len(scheduler.running) >= most:
            self._counters.count(counters.LIMITED, "requests")

    def on_switched_off(self) -> None:
        self._refusals.switch_off()

    def is_uncontended(self) -> bool:
        """True if the next step only decodes, with room for all: order is then irrelevant."""
        scheduler = self._scheduler
        if self._states.waiting_answers or self._order.has_prefilling or self._may_prefill():
            return False
        probes = self._probes
        if probes is not None and probes.are_next and not self._waited_steps:
            return False
        # Load-bearing: a decode also takes tokens for its drafts, and no more blocks than these.
        rows, drafts = len(scheduler.running), scheduler.num_spec_tokens
        blocks = rows * self._num_kv_groups * (2 + 2 * drafts // scheduler.block_size)
        is_roomy = blocks <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return is_roomy and rows * (1 + drafts) <= scheduler.max_num_scheduled_tokens

    def _do_probes_wait(self) -> bool:
        """Whether due probes, which all only observe, wait for a step with prompts."""
        probes = self._probes
        has_graphs = self._model.graph_tokens is not None
        if has_graphs and probes is not None and probes.are_next:
            acts = any(due.watched.config.mode == "enforce" for due in probes.due.values())
            if not acts and self._waited_steps < _MOST_WAITED_STEPS and not self._may_prefill():
                self._waited_steps += 1
                return True
        self._waited_steps = 0
        return False

    def _may_prefill(self) -> bool:
        """Whether the next step may compute prompts, as far as can be known.

        It does not while the request that comes first has found no room, and no room came free.
        """
        if self._refusals.found_no_room(self._scheduler):
            has_held = len(self._scheduler.kv_holding_waiting) > 0
            return has_held or self._load.num_prefilling() > 0
        return self._load.has_prefill()

    def _count_recomputed(self, state: RequestState, output: "SchedulerOutput") -> None:
        """Count the tokens that a request which resumes computes again."""
        lost, state.lost_tokens = state.lost_tokens, None
        if lost is None:
            return
        request = state.request
        # Load-bearing: the scheduled tokens already count as computed; the others are cached.
        cached = request.num_computed_tokens - output.num_scheduled_tokens[request.request_id]
        # Of tokens in flight, those that were not accepted are no tokens of the request.
        again = min(lost, request.num_tokens) - cached
        if again > 0:
            self._counters.count(counters.RECOMPUTED, self._phase(request), again)

    def _phase(self, request: Request) -> Phase:
        state = self._tracker.get(request.request_id)
        return state.phase if state else Phase.ANSWER
