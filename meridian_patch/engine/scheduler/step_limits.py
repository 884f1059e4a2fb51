"""Computes the limits of each step: its token budget, and preemptions for waiting requests."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from meridian_patch.config.policy import PolicyConfig, PolicyRules
from meridian_patch.config.request_options import NO_OPTIONS, RequestOptions
from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.engine.scheduler.admission_checks import (
    may_skip_adapter,
    miscounts_adapters,
    taken_blocks,
)
from meridian_patch.engine.scheduler.answer_pacing import AnswerPacing
from meridian_patch.engine.scheduler.displacing import Displacing
from meridian_patch.engine.scheduler.indivisible_chunks import IndivisibleChunks, first_prompt
from meridian_patch.engine.scheduler.level_review import LevelReview
from meridian_patch.engine.scheduler.step_timer import StepTimer
from meridian_patch.engine.scheduler.waiting_order import WaitingOrder
from meridian_patch.phase.tracker import PhaseTracker
from meridian_patch.policy.levels import Levels
from meridian_patch.policy.prefill_budget import PrefillBudget, PrefillBudgetSettings, PromptRest
from meridian_patch.policy.step_time import StepShape, StepTimeModel
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from meridian_patch.engine.early_exit.probes import Probes
    from meridian_patch.engine.scheduler.refusals import Refusals

# Step counts are reported in batches of so many, to keep the statistics of each step short.
_TOLD_STEPS = 64


class StepLimits(NamedTuple):
    """Limits of one step; None leaves a limit to stock."""

    token_budget: int | None = None
    max_active: int | None = None


class StepLimiter:
    """Works out and applies the limits of each step.

    Args:
        rules: the rules that are on.
        pool_tokens: size of the KV pool.
        full_tokens: the engine's token budget per step.
        pieces: the least prefill that a lowered budget must have room for.
        stages: number of pipeline stages. With several, each request is in one of so many steps.

    Attributes:
        clock: seconds of a monotonic clock.
        probes: probes of thoughts; None: none are made.
        waiting_order: order of the scheduler's waiting queue.
        makes_room: requests were preempted to make room in the next step.
        is_answered_elsewhere: another rank answers, and computes each step together with this one.
        refusals: what upstream refuses while it admits requests; None without time-sharing.
        left_out: whether the last step's lowered budget was used up while prefill was left.
        levels: the levels of requests, which learn from all thoughts.
        ran_steps: steps with tokens whose outputs arrived.
        learnt_steps: steps among them that the step-time model learnt from.
    """

    def __init__(
        self,
        rules: PolicyRules,
        config: PolicyConfig,
        tracker: PhaseTracker,
        pool_tokens: int,
        full_tokens: int,
        pieces: IndivisibleChunks,
        stages: int = 1,
    ) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.model = StepTimeModel()
        self.waiting_order = WaitingOrder(config.aging_s)
        self.probes: Probes | None = None
        self.makes_room = self.left_out = False
        self.is_answered_elsewhere = False
        self.ran_steps = self.learnt_steps = 0
        self._reported_steps = 0, 0
        # Seconds of predicted steps since the last report, and by how much predictions missed them.
        self._predicted_s = self._missed_s = 0.0
        self._pool_tokens = pool_tokens
        self._tracker = tracker
        self._chunks = pieces
        self._stages = stages
        self._timer = StepTimer(self.model.seconds)
        self._cut = PrefillBudget(PrefillBudgetSettings.of(config, full_tokens), self.model)
        self._rules = rules
        itl_s = None if config.answer_itl_ms is None else config.answer_itl_ms / 1000
        self._answer_pacing = AnswerPacing(tracker, itl_s)
        # Options of live requests that set any.
        self._options: dict[str, RequestOptions] = {}
        # Priorities that `meridian_priority` replaced, of live requests.
        self._own_priority: dict[str, int] = {}
        self._displacing: Displacing | None = None
        self.refusals: Refusals | None = None
        self.levels = Levels.of_config(config)
        self._level_review = LevelReview(self.levels, tracker)
        if rules.time_sharing:
            self._displacing = Displacing(
                self.waiting_order,
                tracker,
                config.aging_s,
                self.levels,
            )
            self.refusals = self._displacing.refusals
        self._shape = StepShape(0, 0, 0)
        # Requests whose known tokens are being computed, in the order in which they were admitted.
        self._prefilling: list[Any] = []
        self._budget: int | None = None
        # Whether the step may compute prompts; of so many steps one may.
        self._may_prefill, self._cadence, self._deferred_steps = True, 1, 0
        # The prompt that is computed next, its computed tokens when it became that, and the time.
        self._paced: tuple[Any, int, float] = (None, 0, 0.0)
        # The least prefill that the current budget has room for.
        self._least = 1

    def before_added(self, request: Any, options: RequestOptions, queue: SchedulingPolicy) -> None:
        """Register a request that is about to be added, or a session's next chunk.

        Args:
            request: the new request, or the session.
            options: its parsed ``meridian_*`` fields.
            queue: upstream's policy for the waiting queue.
        """
        # Load-bearing: upstream reads priorities only under its priority policy. Otherwise only
        # `meridian_priority` counts, which operators may allow or not.
        if self._rules.order:
            own = request.priority if queue == SchedulingPolicy.PRIORITY else 0
            # A session's next chunk does not inherit the `meridian_priority` of the one before.
            request.priority = self._own_priority.pop(request.request_id, own)
        self._chunks.waits(request)
        self._options.pop(request.request_id, None)  # of a session's earlier chunk
        if options is not NO_OPTIONS:
            self._options[request.request_id] = options
        if options.meridian_priority and self._rules.order:
            self._own_priority[request.request_id] = request.priority
            request.priority = options.meridian_priority

    @property
    def num_answering(self) -> int:
        """Number of requests in their answer phase whose reader waits for tokens."""
        return len(self._answer_pacing)

    @property
    def is_stock(self) -> bool:
        """Whether no request thinks and none waits behind later ones: all is done as in stock."""
        has_overtaken = self._displacing is not None and self._displacing.has_overtaken
        return not (self._tracker.num_reasoning or self.is_answered_elsewhere or has_overtaken)

    def on_added(self, request: Request, waiting: Any) -> None:
        """Place a new request in ``waiting``, if upstream put it there."""
        if self._rules.are_all_off:
            return
        options = self._options.get(request.request_id, NO_OPTIONS)
        priority = options.meridian_priority if self._rules.order else 0
        level, now_s = 0, self.clock()
        if self._displacing and not self.is_stock:
            level = self.levels.of(0, request.num_prompt_tokens)
            self._displacing.added(request, level, now_s)
        self.waiting_order.on_added(request, waiting, level, priority, now_s)

    def changed(self, request: Request) -> None:
        """Update the pacing of a request whose phase may have changed."""
        name = request.request_id
        self._answer_pacing.changed(name, self._options.get(name, NO_OPTIONS))
        self._level_review.changed(request)

    def pauses(self, session: Request) -> None:
        """Stop pacing a session that waits for its next chunk."""
        self._answer_pacing.on_removed(session.request_id)
        self._level_review.turn_ended(session)
        if self._displacing:
            self._displacing.ends_turn(session)

    def goes_on(self, session: Request) -> None:
        """Note a session with its next chunk: without KV blocks it waits at the front."""
        self.waiting_order.moved_to_front(session)
        self._level_review.goes_on(session)

    def on_removed(self, request: Request) -> None:
        """Forget a request that finished or was aborted."""
        self._answer_pacing.on_removed(request.request_id)
        if self._paced[0] is request:
            self._paced = None, 0, 0.0
        self._options.pop(request.request_id, None)
        self._own_priority.pop(request.request_id, None)
        self._chunks.on_removed(request)
        self._stops_prefilling(request)
        self.waiting_order.on_removed(request)
        self._level_review.on_removed(request)
        if self._displacing:
            self._displacing.on_removed(request)

    def preempted(self, request: Request, *, is_answer: bool) -> None:
        """Register a preempted request, which waits now."""
        self._chunks.waits(request)
        self._stops_prefilling(request)
        self.waiting_order.moved_to_front(request)
        if self._displacing and not is_answer:
            self._displacing.preempted(request, self.clock())

    def _stops_prefilling(self, request: Request) -> None:
        """Remove a request from the list of prefilling ones, which is short."""
        if request in self._prefilling:
            self._prefilling.remove(request)

    def plan(
        self, scheduler: Any, answers: Collection[Any] = (), *, may_prefill: bool = True
    ) -> StepLimits:
        """Limits of the next step; may preempt running requests.

        Args:
            scheduler: the phase-aware scheduler.
            answers: answers that were preempted; they go before all other waiting requests.
            may_prefill: whether the step may compute prompts.
        """
        now_s = self.clock()
        # First, because room is made for the request at the front.
        self._order_waiting(scheduler, answers, now_s)
        self.decodes(scheduler)
        self.count_cadence(may_prefill=may_prefill)
        if not may_prefill:
            # No prompt is computed whatever the budget, and no request is admitted.
            return StepLimits()
        # Before room is made, because prompts in progress take blocks for so many tokens.
        budget = self._cut_budget(scheduler, now_s, len(answers))
        max_active = None
        if budget is not None and (
            self._may_leave_out_adapter(scheduler, budget)
            or self._chunks.keeps_others_out(scheduler, self._prefilling)
        ):
            if not answers:
                self._budget = budget
                return StepLimits(budget, max_active=0)
            budget = None
        if self._may_strand_adapter(scheduler, budget):
            self._budget = budget
            return StepLimits(budget, max_active=0)
        if self._displacing:
            if self._level_review.review(scheduler.current_step, scheduler.running):
                self._displacing.levels_changed()
            rows = len(scheduler.running)
            self._displacing.make_room(scheduler, now_s, budget, self._shape.decode_tokens)
            if self._displacing.skips_adapter:
                # As above: no other adapter may come in beside one that is left out.
                max_active = 0
            if len(scheduler.running) < rows:
                self.decodes(scheduler)
                self.makes_room = True
                if scheduler.connector or scheduler.aux_output_connector:
                    # Load-bearing: connectors do not expect a request that was preempted in a step
                    # to load or run in it. The room is used in the next one, unless this is empty.
                    max_active = 0 if scheduler.running else 1
        self._budget = budget
        return StepLimits(budget, max_active)

    def count_cadence(self, *, may_prefill: bool) -> None:
        """Note whether the next step may compute prompts."""
        self._may_prefill = may_prefill
        if may_prefill:
            self._cadence, self._deferred_steps = 1 + self._deferred_steps, 0
        else:
            self._deferred_steps += 1

    def _order_waiting(self, scheduler: Any, answers: Collection[Any], now_s: float) -> None:
        if self._displacing:
            self._displacing.order_waiting(scheduler, now_s)
        if answers:
            self.waiting_order.bring_forward(
                [one for one in answers if one.status == RequestStatus.PREEMPTED],
                scheduler.waiting,
            )

    def _cut_budget(self, scheduler: Any, now_s: float, num_waiting: int) -> int | None:
        """Lowered token budget of the next step; None: stock's.

        Args:
            scheduler: the phase-aware scheduler.
            now_s: time of the monotonic clock.
            num_waiting: answers that were preempted. Where all are, a cut would shorten the steps
                of none, and only lengthen the prompts that they wait for.
        """
        if not self._rules.step_cut:
            return None
        if len(self._answer_pacing) <= num_waiting and not self.is_answered_elsewhere:
            return None
        least = self._chunks.least_prefill(scheduler, self._prefilling)
        if least is None:
            return None
        self._least = least
        before, default_s = self._tokens_before(scheduler), self._default_itl_s()
        target_s, owed = None, 0
        if default_s is not None:
            target_s = self._answer_pacing.target_s(default_s * self._stages) / self._stages
            if self._prefilling and target_s <= default_s:
                # Where no longer latency was asked for, a prompt is not held up without bound.
                owed = self._owed_tokens(now_s)
        return self._cut.token_budget(self._shape, before, target_s, now_s, least, owed)

    def _may_leave_out_adapter(self, scheduler: Any, budget: int) -> bool:
        if not self._chunks.may_skip_running:
            return False
        probes = filter(None, map(scheduler.requests.get, self._live_probes()))
        chunks = [*self._prefilling, *probes]
        return may_skip_adapter(scheduler, chunks, self._shape.decode_tokens, budget)

    def _may_strand_adapter(self, scheduler: Any, budget: int | None) -> bool:
        """Whether a running request with a LoRA adapter may get no KV block in the next step.

        No request must be admitted then, for the same reason. Load-bearing: while the blocks of a
        victim may still be written, or a connector is about to free some, upstream stops at a
        request that gets no block, preempts none, and goes on to the waiting ones.
        """
        has_adapter = any(request.lora_request for request in scheduler.running)
        if scheduler.connector is None or not has_adapter or not miscounts_adapters(scheduler):
            return False
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return taken_blocks(scheduler, budget) > int(free)

    def num_prefilling(self) -> int:
        """Number of running requests with known tokens that are not computed yet."""
        if self._prefilling:
            # Load-bearing: True while a scheduled chunk leaves known tokens uncomputed.
            self._prefilling = [
                request
                for request in self._prefilling
                if request.is_prefill_chunk and request.status == RequestStatus.RUNNING
            ]
        return len(self._prefilling)

    def has_prefill(self, scheduler: Any) -> bool:
        """Whether any running or waiting request has known tokens that are not computed yet."""
        # Load-bearing: waiting requests that hold blocks (KV that was loaded, or the next chunk of
        # a session) are in this separate queue, and so are paused sessions.
        holding = len(scheduler.kv_holding_waiting) - scheduler.num_waiting_for_streaming_input
        return bool(scheduler.waiting) or holding > 0 or self.num_prefilling() > 0

    def may_prefill(self, scheduler: Any) -> bool:
        """Whether the next step may compute prompts, as far as can be known.

        It does not while the request that comes first has found no room, and no room came free.
        """
        if self._displacing and self._displacing.found_no_room(scheduler):
            return len(scheduler.kv_holding_waiting) > 0 or self.num_prefilling() > 0
        return self.has_prefill(scheduler)

    def decodes(self, scheduler: Any) -> None:
        """Record the next step's decode tokens and KV context, and reset its other limits."""
        held = int(scheduler.kv_cache_manager.usage * self._pool_tokens)
        rows = max(len(scheduler.running) - self.num_prefilling() - len(self._live_probes()), 0)
        tokens = rows
        if self._stages > 1:
            due = _due_of(scheduler)
            held = held * len(due) // max(rows, 1)
            tokens = sum(due)
        elif scheduler.num_spec_tokens:
            # Load-bearing: a request's drafts are computed in the step after they were made.
            tokens += sum([len(request.spec_token_ids) for request in scheduler.running])
        self._shape = StepShape(0, tokens, held)
        self._budget = None
        self.makes_room = False

    def _tokens_before(self, scheduler: Any) -> int:
        """Upper bound of the number of tokens before the next prompt chunk."""
        if self._prefilling:
            return int(self._prefilling[0].num_computed_tokens)
        head = first_prompt(scheduler)
        if head is None:
            return 0
        # How much of a prompt is cached is known before scheduling only if it holds blocks. This
        # assumes that all of it is, which is common after a preemption. If nothing is cached, the
        # first chunk is smaller than necessary.
        return int(head.num_computed_tokens or head.num_tokens)

    def scheduled(self, scheduler: Any, output: Any, started: Sequence[str]) -> None:
        """Note a scheduled step; the time of a step that is not noted is not learnt from."""
        total, now_s = output.total_num_scheduled_tokens, self.clock()
        self.left_out = False
        for name in started:
            request = scheduler.requests[name]
            if not isinstance(request, ProbeRequest):
                self._prefilling.append(request)
                self._chunks.begins(request)
                if self._displacing:
                    self._displacing.begun(request)
        if not total:
            return
        tokens_of = output.num_scheduled_tokens
        prefill = probed = attended = 0
        for request in self._prefilling:
            tokens = tokens_of.get(request.request_id, 0)
            prefill += tokens
            attended += _attended(request, tokens)
        for name in self._live_probes():
            tokens = tokens_of.get(name, 0)
            if tokens:
                probed += tokens
                attended += _attended(scheduler.requests[name], tokens)
        budget, is_waited = self._budget, self.has_prefill(scheduler)
        # A rest of the budget that is smaller than the least piece cannot be used.
        is_used_up = budget is not None and total > budget - (self._least if is_waited else 1)
        if self._may_prefill:
            self._cut.ran(prefill, is_used_up=is_used_up, now_s=now_s)
        self.left_out = is_used_up and is_waited
        if prefill or (budget is not None and budget > self._shape.decode_tokens):
            self._chunks.ran(has_prefill=prefill > 0, is_waited=is_waited)
        decodes, held = total - prefill - probed, self._shape.context_tokens
        self._timer.scheduled(output, StepShape(prefill, decodes, held, attended, probed), now_s)

    def launched(self, output: Any) -> None:
        """Note that the workers have been given a step."""
        self._timer.launched(output, self.clock())

    def ended(self, output: Any) -> None:
        """Learn from a step whose output arrived."""
        now_s = self.clock()
        timed = self._timer.ended(output, now_s)
        if output.total_num_scheduled_tokens:
            self.ran_steps += 1
            if timed is not None:
                shape, seconds = timed
                predicted_s = self.model.seconds(shape)
                if self.model.observe(shape, seconds):
                    self.learnt_steps += 1
                    if predicted_s is not None:
                        self._predicted_s += seconds
                        self._missed_s += abs(predicted_s - seconds)

    def report_steps(self, phase_counters: PhaseCounters) -> bool:
        """Count the steps that ran and were learnt from since the last report, in batches.

        Returns:
            Whether a batch was counted.
        """
        ran, learnt = self._reported_steps
        if self.ran_steps - ran < _TOLD_STEPS:
            return False
        phase_counters.count(counters.STEP, "ran", self.ran_steps - ran)
        phase_counters.count(counters.STEP, "learnt", self.learnt_steps - learnt)
        self._reported_steps = self.ran_steps, self.learnt_steps
        phase_counters.count(counters.STEP_SECONDS, "measured", self._predicted_s)
        phase_counters.count(counters.STEP_SECONDS, "error", self._missed_s)
        self._predicted_s = self._missed_s = 0.0
        return True

    def _live_probes(self) -> Collection[str]:
        """Ids of the live probes, including those that were not scheduled in the step."""
        return self.probes.live if self.probes else ()

    def _default_itl_s(self) -> float | None:
        """Seconds that a step may take where no latency is asked for; None while not known."""
        # The context of prompts in progress is subtracted: only their prefill reads it.
        held = sum(request.num_computed_tokens for request in self._prefilling)
        context = max(self._shape.context_tokens - held, 0)
        # With pipeline parallelism a request gets a token in one of `stages` steps.
        return self._cut.default_itl_s(self._shape._replace(context_tokens=context))

    def _owed_tokens(self, now_s: float) -> int:
        """Prefill of this step with which the prompt in progress is not held up without bound."""
        prompt = self._prefilling[0]
        if self._paced[0] is not prompt:
            self._paced = prompt, prompt.num_computed_tokens, now_s
        _, begun, since_s = self._paced
        rest = PromptRest(prompt.num_tokens, prompt.num_computed_tokens, begun, now_s - since_s)
        return self._cut.owed_tokens(self._shape, rest, self._cadence)


def _attended(request: Request, tokens: int) -> int:
    """Number of tokens attended to, summed over the tokens of a chunk just scheduled."""
    # Load-bearing: the scheduled tokens already count as computed.
    return tokens * (2 * request.num_computed_tokens - tokens + 1) // 2


def _due_of(scheduler: Any) -> list[int]:
    """Tokens per request that decodes in the next step."""
    next_step = scheduler.current_step + 1
    # Load-bearing: with pipeline parallelism a request whose last token is still in flight has
    # nothing to compute or is not eligible. The others compute one token and their drafts.
    return [
        1 + len(request.spec_token_ids)
        for request in scheduler.running
        if not request.is_prefill_chunk
        and request.next_decode_eligible_step <= next_step
        and request.num_tokens_with_spec + request.num_output_placeholders
        > request.num_computed_tokens
    ]
