"""Lowers the token budget of steps while requests answer, by the latency that they ask for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from meridian_patch.config.policy import PolicyConfig, PolicyRules
from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine.request_state import RequestStates
from meridian_patch.engine.scheduler.admission_checks import (
    may_skip_adapter,
    miscounts_adapters,
    taken_blocks,
)
from meridian_patch.engine.scheduler.indivisible_chunks import IndivisibleChunks, must_be_whole
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.engine.scheduler.step_load import StepLoad
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.prefill_budget import (
    UNNOTICED_S,
    PrefillBudget,
    PrefillBudgetSettings,
    PromptRest,
)
from meridian_patch.policy.step_time import StepTimeModel
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling


class StepCut(SchedulerPart):
    """Follows the requests that answer, and asks ``PrefillBudget`` for each step's token budget.

    A request may set its own target. A target below the default (which the policy keeps when
    nothing is configured) is raised to it: no step could keep it, and it would only delay prefill.

    Args:
        scheduler: the phase-aware scheduler.
        rules: the rules that are on.
        config: the section ``policy`` of the configuration.
        states: records of all requests.
        tracker: phases of all requests.
        load: counts the tokens of steps.
        chunks: the least prefill that a lowered budget must have room for.
        model: predicts the time of steps.
        phase_counters: count the steps that a lowered budget left prefill out of.
    """

    name = counters.POLICY

    def __init__(
        self,
        scheduler: "PhaseScheduling",
        rules: PolicyRules,
        config: PolicyConfig,
        states: RequestStates,
        tracker: PhaseTracker,
        load: StepLoad,
        chunks: IndivisibleChunks,
        model: StepTimeModel,
        phase_counters: PhaseCounters,
    ) -> None:
        self._scheduler = scheduler
        self._rules = rules
        self._states = states
        self._tracker = tracker
        self._load = load
        self._chunks = chunks
        self._counters = phase_counters
        settings = PrefillBudgetSettings.of(config, scheduler.max_num_scheduled_tokens)
        self._cut = PrefillBudget(settings, model)
        self._itl_s = None if config.answer_itl_ms is None else config.answer_itl_ms / 1000
        # Of so many steps one may compute prompts.
        self._cadence, self._deferred_steps = 1, 0
        # The prompt that is computed next, its computed tokens when it became that, and the time.
        self._paced: tuple[Any, int, float] = (None, 0, 0.0)

    def before_added(self, request: Request, options: RequestOptions) -> None:
        self._wait(request)

    def on_preempted(self, request: Request) -> None:
        self._wait(request)

    def on_phase_changed(self, request: Request) -> None:
        state, states = self._tracker.get(request.request_id), self._states
        record = states.of(request)
        if state is None or state.phase is not Phase.ANSWER:
            states.answering.pop(record, None)
            states.impatient.pop(record, None)
        elif record not in states.answering:
            states.answering[record] = None
            if record.options.itl_s is not None:
                states.impatient[record] = None

    def on_freed(self, request: Request) -> None:
        if self._paced[0] is request:
            self._paced = None, 0, 0.0

    def before_schedule(self, plan: StepPlan) -> None:
        if plan.may_prefill:
            self._cadence, self._deferred_steps = 1 + self._deferred_steps, 0
        else:
            # No prompt is computed whatever the budget, and no request is admitted.
            self._deferred_steps += 1
            return
        if not plan.is_contended:
            return
        # Before room is made, because prompts in progress take blocks for so many tokens.
        budget = self._budget(plan)
        if budget is not None and (
            self._may_leave_out_adapter(plan, budget)
            or self._chunks.keeps_others_out(self._scheduler, self._load.prompts())
        ):
            if not plan.num_answers_waiting:
                plan.token_budget, plan.max_active = budget, 0
                return
            budget = None
        plan.token_budget = budget
        if self._may_strand_adapter(budget):
            plan.max_active = 0

    def after_schedule(
        self, plan: StepPlan, output: "SchedulerOutput", started: Sequence[str]
    ) -> None:
        ran, budget = plan.ran, plan.token_budget
        if ran is None:
            return
        is_waited = self._load.has_prefill()
        # A rest of the budget that is smaller than the least piece cannot be used.
        least = plan.least_prefill if is_waited else 1
        is_used_up = budget is not None and output.total_num_scheduled_tokens > budget - least
        has_prefill = ran.prefill_tokens > 0
        if plan.may_prefill:
            self._cut.ran(ran.prefill_tokens, is_used_up=is_used_up, now_s=plan.scheduled_s)
        if is_used_up and is_waited:
            self._counters.count(counters.LIMITED, "tokens")
        if has_prefill or (budget is not None and budget > plan.shape.decode_tokens):
            self._chunks.ran(has_prefill=has_prefill, is_waited=is_waited)

    def _wait(self, request: Request) -> None:
        """Note a request that is new or was preempted, if its prompt must be computed whole."""
        if must_be_whole(request):
            state = self._states.of(request)
            self._states.whole_waiting[state] = None
            self._states.whole_running.pop(state, None)

    def _budget(self, plan: StepPlan) -> int | None:
        """Lowered token budget of the next step; None: stock's."""
        if not self._rules.step_cut:
            return None
        # Where all answers wait, a cut would shorten the steps of none, and only lengthen the
        # prompts that they wait for.
        num_reading = len(self._states.answering) - plan.num_answers_waiting
        if num_reading <= 0 and not plan.is_answered_elsewhere:
            return None
        prompts = self._load.prompts()
        least = self._chunks.least_prefill(self._scheduler, prompts)
        if least is None:
            return None
        plan.least_prefill = least
        before, default_s = self._load.tokens_before_prefill(), self._default_itl_s(plan, prompts)
        target_s, owed, stages = None, 0, self._load.stages
        if default_s is not None:
            # With pipeline parallelism a request gets a token in one of `stages` steps.
            target_s = self._target_s(default_s * stages) / stages
            if prompts and target_s <= default_s:
                # Where no longer latency was asked for, a prompt is not held up without bound.
                owed = self._owed_tokens(plan, prompts[0])
        rest = prompts[0].num_tokens - prompts[0].num_computed_tokens if prompts else 0
        patient_s = self._patient_s(plan) / stages
        budget = self._cut.token_budget(
            plan.shape, before, target_s, plan.now_s, least, owed, rest, patient_s
        )
        has_target = self._itl_s is not None or self._states.impatient
        # Prompts in progress, and requests with blocks that wait, would take what it is raised by.
        if not (has_target or prompts or self._scheduler.kv_holding_waiting):
            plan.probe_budget = self._cut.probe_budget(plan.shape, budget)
        return budget

    def _target_s(self, default_s: float) -> float:
        """The tightest inter-token latency requested; ``default_s`` if none is configured."""
        common_s, impatient = self._itl_s or default_s, self._states.impatient
        if not impatient:
            return common_s
        tightest_s = max(min(state.options.itl_s or default_s for state in impatient), default_s)
        have_all = len(impatient) == len(self._states.answering)
        return tightest_s if have_all else min(common_s, tightest_s)

    def _patient_s(self, plan: StepPlan) -> float:
        """Inter-token latency that is accepted where too little prefill ends in the default one.

        0: none. Other ranks do not send what their requests ask for.
        """
        if self._itl_s is not None or plan.is_answered_elsewhere:
            return 0.0
        asked = [state.options.itl_s or UNNOTICED_S for state in self._states.impatient]
        return min([UNNOTICED_S, *asked])

    def _default_itl_s(self, plan: StepPlan, prompts: Sequence[Request]) -> float | None:
        """Seconds that a step may take where no latency is asked for; None while not known."""
        # The context of prompts in progress is subtracted: only their prefill reads it.
        held = sum(request.num_computed_tokens for request in prompts)
        context = max(plan.shape.context_tokens - held, 0)
        return self._cut.default_itl_s(plan.shape._replace(context_tokens=context))

    def _owed_tokens(self, plan: StepPlan, prompt: Request) -> int:
        """Prefill of this step with which the prompt in progress is not held up without bound."""
        if self._paced[0] is not prompt:
            self._paced = prompt, prompt.num_computed_tokens, plan.now_s
        _, begun, since_s = self._paced
        spent_s = plan.now_s - since_s
        rest = PromptRest(prompt.num_tokens, prompt.num_computed_tokens, begun, spent_s)
        return self._cut.owed_tokens(plan.shape, rest, self._cadence)

    def _may_leave_out_adapter(self, plan: StepPlan, budget: int) -> bool:
        if not self._chunks.may_skip_running:
            return False
        chunks, decodes = self._load.prompts_and_probes(), plan.shape.decode_tokens
        return may_skip_adapter(self._scheduler, chunks, decodes, budget)

    def _may_strand_adapter(self, budget: int | None) -> bool:
        """Whether a running request with a LoRA adapter may get no KV block in the next step.

        No request must be admitted then, for the same reason. Load-bearing: while the blocks of a
        victim may still be written, or a connector is about to free some, upstream stops at a
        request that gets no block, preempts none, and goes on to the waiting ones.
        """
        scheduler = self._scheduler
        has_adapter = any(request.lora_request for request in scheduler.running)
        if scheduler.connector is None or not has_adapter or not miscounts_adapters(scheduler):
            return False
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return taken_blocks(scheduler, budget) > int(free)
