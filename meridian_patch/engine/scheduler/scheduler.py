"""The phase-aware schedulers: vLLM's own, with the queues arranged before each step.

Runs in the EngineCore process. No upstream body is copied: ``schedule()`` arranges, calls
``super()`` and restores.
"""

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from meridian_patch import envs
from meridian_patch.config.load import load_config
from meridian_patch.config.request_options import NO_OPTIONS, RequestOptions
from meridian_patch.engine import stats_field, status
from meridian_patch.engine.api.exit_summary import attach_all
from meridian_patch.engine.boundaries import resolve_boundaries
from meridian_patch.engine.early_exit.binding import build_early_exit
from meridian_patch.engine.early_exit.manager import Exits
from meridian_patch.engine.early_exit.probe_request import ProbeRequest
from meridian_patch.engine.early_exit.probes import keep_end_untold, strip
from meridian_patch.engine.early_exit.unavailable import UnavailableEarlyExit
from meridian_patch.engine.kv_cache.binding import build_kv_tiers
from meridian_patch.engine.scheduler.guard import StepGuard
from meridian_patch.engine.scheduler.indivisible_chunks import IndivisibleChunks
from meridian_patch.engine.scheduler.kv_units import kv_units
from meridian_patch.engine.scheduler.offload_estimate import build_offload_estimate
from meridian_patch.engine.scheduler.options_parser import OptionsParser
from meridian_patch.engine.scheduler.rank_agreement import decide_alike
from meridian_patch.engine.scheduler.running_order import ArrivalOrder, RunningOrder
from meridian_patch.engine.scheduler.started_requests import started_requests
from meridian_patch.engine.scheduler.step_limits import UNLIMITED, Limited, StepLimiter, StepLimits
from meridian_patch.exit.obstacles import Obstacle
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.profiles import choose_rules
from meridian_patch.policy.running_order import LatencyPolicy
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import Fallback, PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as UpstreamScheduler
else:
    UpstreamScheduler = object

logger = init_logger("vllm.meridian_patch")


class PhaseScheduling(UpstreamScheduler):
    """Mixin over vLLM's ``Scheduler`` or ``AsyncScheduler``.

    1. Every request's phase is followed from its prompt and its accepted tokens.
    2. Before a step, the running requests are put in the policy's order: it decides who gets
       tokens first and, from its end, who is preempted.
    3. The step's token budget and the number of requests that may run are lowered for its length.
    4. A request that has thought for long may be preempted before the step to let a newcomer in.
    5. Preempted answers resume before anything else that waits.
    6. Thoughts are followed by their signals, probed and, where that is asked for, closed.
    7. Without reasoning requests, or with noop and no early exit, every decision is stock.
    8. What fails or takes too long is counted, and the step runs as stock.

    Invariant: requests change queues only as ``super()`` itself moves them.
    """

    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loaded = load_config(envs.environment())
        config, limited_by = decide_alike(loaded.config, self.vllm_config)
        boundaries = resolve_boundaries(self.vllm_config, loaded)
        policy_config = config.policy
        rules = choose_rules(policy_config)
        if self.policy == SchedulingPolicy.PRIORITY:
            # Who makes room for whom is the operator's to say then.
            rules = replace(rules, time_sharing=False)
        units = kv_units(self)
        if rules.admission and not units.is_growing:
            rules = replace(rules, admission=False)
            logger.warning(
                "meridian_patch: the rule admission is off: no cache group of the model grows with "
                "a request, so the KV pool's peak cannot be forecast"
            )
        self.phase_tracker = PhaseTracker(boundaries, policy_config.protected_answer_tokens)
        self.phase_counters = PhaseCounters()
        self._phase_guard = StepGuard(self.phase_counters)
        self._options_parser = OptionsParser(config.requests, self.phase_counters)
        self._phase_rules = rules
        self._is_stock = rules.are_all_off
        self._num_kv_groups = len(self.kv_cache_config.kv_cache_groups)
        self._time_budget_s = policy_config.time_budget_us * 1e-6
        kept = build_offload_estimate(self, is_reasoning=boundaries is not None)
        order = LatencyPolicy(
            policy_config.protected_answer_tokens,
            policy_config.max_preemptions,
            by_work=rules.victims,
            keeps_thinking=kept is not None and kept.has_thinking,
        )
        self._phase_order = RunningOrder(
            order, self.phase_tracker, policy_config.time_budget_us, kept
        )
        self._chunks = IndivisibleChunks(self)
        # Whether the step that is being scheduled has less than the engine's own budget.
        self._is_cut = False
        self.step_limiter = StepLimiter(
            rules,
            policy_config,
            self.phase_tracker,
            units,
            self.max_num_scheduled_tokens,
            self._chunks,
            kept,
            self.parallel_config.pipeline_parallel_size,
        )
        self._kv_tiers = build_kv_tiers(
            self.kv_cache_manager,
            config,
            boundaries,
            self.phase_tracker,
            self._phase_guard,
            self.phase_counters,
        )
        obstacle = Obstacle.NO_BOUNDARY if boundaries is None else None
        obstacle = Obstacle.EXTERNAL_LAUNCHER if limited_by else obstacle
        self.early_exit = (
            None
            if obstacle
            else build_early_exit(self, config, boundaries, self.phase_tracker, self.phase_counters)
        )
        self.step_limiter.probes = self.early_exit.probes if self.early_exit else None
        # A request may ask for early exit by itself.
        self._unavailable_exit = UnavailableEarlyExit(config.exit, obstacle) if obstacle else None
        # Known tokens, by request, of those whose next tokens the tracker wants to see.
        self._expected: dict[str, int] = {}
        # Of the step that is being scheduled, under vLLM's priority policy.
        self._arrivals: ArrivalOrder | None = None
        # Preempted answers that have not resumed yet; left in _free_request or on resume.
        self._waiting_answers: dict[str, Any] = {}
        # Streaming sessions within a turn, by id.
        self._sessions: dict[str, Any] = {}
        facts = {
            "scheduler": type(self).__name__,
            "scheduler_base": type(self).__mro__[2].__name__,
            "policy": policy_config.name,
            "rules": [name for name, is_on in asdict(rules).items() if is_on],
            "config_digest": loaded.digest,
            "family": boundaries.family if boundaries else None,
            "boundaries": boundaries and {"start": boundaries.start, "end": boundaries.end},
            "kv_tiers": self._kv_tiers.history if self._kv_tiers else "off",
            "exit": self.early_exit.mode if self.early_exit else "off",
            "limited_by": limited_by,
        }
        status.publish(role="engine_core", **facts)
        logger.info("meridian_patch live in EngineCore: %s", facts)

    def add_request(self, request: Any) -> None:
        # A session's next chunk is looked at when the session takes it up.
        is_new = request.request_id not in self.requests
        options = self._accept(request) if is_new else NO_OPTIONS
        super().add_request(request)
        if is_new:
            self._track(request)
            with self._phase_guard.protect("the policy", request.request_id):
                self.step_limiter.arrived(request, self.waiting)
            self._watch(request, options)
            if request.resumable:
                self._sessions[request.request_id] = request

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        # Load-bearing: upstream appends the next chunk to the list of known tokens in place. What
        # the turn before made is taken in first, or the chunk would count as its output.
        self._end_turn(session)
        super()._update_request_as_session(session, update)
        self._sessions[session.request_id] = session
        options = self._accept(session)
        self._track(session)
        self._watch(session, options)

    def _accept(self, request: Any) -> RequestOptions:
        """Parse what a request asks for; none of it counts where a part of it is wrong."""
        options = NO_OPTIONS
        with self._phase_guard.protect("reading vllm_xargs", request.request_id):
            options = self._options_parser.parse(request)
        with self._phase_guard.protect("the policy", request.request_id):
            self.step_limiter.before_added(request, options, self.policy)
        return options

    def _end_turn(self, session: Any) -> None:
        """A session made its last token before the next chunk, which may not be there yet."""
        self._observe(session.request_id)
        if self.early_exit:
            with self._phase_guard.protect("early exit", session.request_id):
                self.early_exit.freed(session)
        self.step_limiter.pauses(session)
        self._phase_order.forget(session)
        self._waiting_answers.pop(session.request_id, None)
        self._sessions.pop(session.request_id, None)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self.early_exit and isinstance(request, ProbeRequest):
            with self._phase_guard.protect("early exit", request.request_id):
                is_aborted = request.status == RequestStatus.FINISHED_ABORTED
                self.early_exit.probe_ended(request, is_aborted=is_aborted)
            self._phase_order.forget(request)
            freed = super()._free_request(request, *args, **kwargs)
            keep_end_untold(self, request)
            return freed
        # A request ends before its last tokens were taken in.
        self._observe(request.request_id)
        if self.early_exit:
            with self._phase_guard.protect("early exit", request.request_id):
                self.early_exit.freed(request)
        if self._unavailable_exit:
            self._unavailable_exit.freed(request)
        with self._phase_guard.protect("the policy", request.request_id):
            self.step_limiter.left(request)
        if self._kv_tiers:
            self._kv_tiers.finished(request)
        self.phase_tracker.remove(request.request_id)
        self._phase_order.forget(request)
        self._waiting_answers.pop(request.request_id, None)
        self._sessions.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def _free_blocks(self, request: Any) -> None:
        if self._kv_tiers is None:
            super()._free_blocks(request)
            return
        self._kv_tiers.begin_free(request)
        try:
            super()._free_blocks(request)
        finally:
            self._kv_tiers.end_free()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._phase_guard.new_step()
        limits = UNLIMITED
        if not self._is_stock:
            with self._phase_guard.protect("the policy"):
                if not self.phase_tracker.num_reasoning:
                    self.step_limiter.decodes(self)
                elif self._is_quiet():
                    self.step_limiter.decodes(self)
                    self._phase_order.pass_over()
                else:
                    limits = self._plan()
                    self._arrivals = self._arrange()
        exits = self._busy_early_exit
        if exits:
            with self._phase_guard.protect("early exit"):
                exits.arrange(
                    self.current_step,
                    may_probe=not self._waiting_answers and not self.step_limiter.makes_room,
                    token_budget=limits.token_budget,
                )
                limits = limits.with_probes(exits.num_probes)
                limits = limits.with_seats(exits.user_seats(self.max_num_active_reqs))
        self._is_cut = limits.token_budget is not None
        try:
            with Limited(self, limits):
                output = super().schedule(*args, **kwargs)
        finally:
            self._is_cut = False
            if self._arrivals is not None:
                self._arrivals.restore()
                self._arrivals = None
        if not self._is_stock:
            # Of every step: a step that is not noted takes the next one's time with it.
            with self._phase_guard.protect("the policy"):
                self.step_limiter.scheduled(self, output)
        if exits:
            with self._phase_guard.protect("early exit"):
                exits.scheduled(output)
        # Load-bearing: nobody gets a first token who is in neither of the two.
        for request_id in started_requests(output):
            self.phase_tracker.runs(request_id)
            self._waiting_answers.pop(request_id, None)
        # Load-bearing: after the last request there is one more step, which tells the workers;
        # its tokens are on their way by then.
        if self._kv_tiers and not self.requests:
            self._kv_tiers.check()
        return output

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with self._phase_guard.protect("the policy"):
            self.step_limiter.ended(scheduler_output)
        is_followed = False
        with self._phase_guard.protect("the phase tracker"):
            # Load-bearing: rows of token ids; a request accepts none that is not in its row.
            self._expected = self.phase_tracker.expects(
                model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
            )
            is_followed = True
        exits = self._busy_early_exit
        if exits:
            with self._phase_guard.protect("early exit"):
                exits.returned(model_runner_output)
        result = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        while self._expected:
            self._observe(next(iter(self._expected)))
        if not is_followed:
            for request_id in model_runner_output.req_id_to_index:
                self._resync(request_id)
        # Load-bearing: the status of a session that waits for its next chunk.
        for session in list(self._sessions.values()):
            if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                self._end_turn(session)
        if exits:
            with self._phase_guard.protect("early exit"):
                exits.took_in(scheduler_output.num_scheduled_tokens)
            with self._phase_guard.protect("early exit"):
                ended = exits.take_ended()
                if ended:
                    strip(result, ended)
            with self._phase_guard.protect("early exit"):
                attach_all(result, exits.drain_outcomes())
        if self._unavailable_exit:
            with self._phase_guard.protect("early exit"):
                self._unavailable_exit.tell(result)
        return result

    def _try_schedule_encoder_inputs(
        self, request: Any, computed: int, tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        # Load-bearing: every chunk of a request with media passes here once its length is cut to
        # the budget; what upstream makes of a chunk of no tokens is no chunk.
        if self._is_cut:
            with self._phase_guard.protect("the policy", request.request_id):
                tokens = self._chunks.whole_media_tokens(request, computed, tokens)
        return super()._try_schedule_encoder_inputs(request, computed, tokens, *args, **kwargs)

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        grammar = super().get_grammar_bitmask(scheduler_output)
        if self.early_exit and self.early_exit.forced_closes:
            with self._phase_guard.protect("early exit"):
                return self.early_exit.forced_closes.add_rows(scheduler_output, grammar)
        return grammar

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        probes = self.early_exit.probes if self.early_exit else None
        if probes is not None:
            if request_ids is not None:
                request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            with self._phase_guard.protect("early exit"):
                # Before their parents: none must end while upstream walks through the requests.
                if request_ids is None:
                    probes.cancel_all()
                for request_id in request_ids or ():
                    probes.cancel(request_id)
        return super().finish_requests(request_ids, *args, **kwargs)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        # Before upstream preempts what runs: a preempted probe would compute its whole thought.
        if reset_running_requests and self.early_exit and self.early_exit.probes:
            with self._phase_guard.protect("early exit"):
                self.early_exit.probes.recall()
        return bool(super().reset_prefix_cache(reset_running_requests, *args, **kwargs))

    @property
    def _busy_early_exit(self) -> Exits | None:
        return None if self.early_exit is None or self.early_exit.is_idle else self.early_exit

    def _observe(self, request_id: str) -> None:
        """Take in the tokens that a request was expected to accept, if it was."""
        seen = self._expected.pop(request_id, None)
        if seen is None:
            return
        with self._phase_guard.protect("the phase tracker", request_id):
            if self.phase_tracker.observe(request_id, seen):
                self._phase_changed(request_id)
            return
        self._resync(request_id)

    def _resync(self, request_id: str) -> None:
        """Following the request's tokens failed; a boundary may have been among them."""
        with self._phase_guard.protect("the phase tracker", request_id):
            if self.phase_tracker.resync(request_id):
                self._phase_changed(request_id)

    def _phase_changed(self, request_id: str) -> None:
        request = self.requests[request_id]
        self._phase_order.changed(request)
        if self.early_exit:
            self.early_exit.changed(request_id)
        state = self.phase_tracker.get(request_id)
        is_answer = state is not None and state.phase is Phase.ANSWER
        # Its boundary was on the way when it was preempted.
        if is_answer and request.status == RequestStatus.PREEMPTED:
            self._waiting_answers[request_id] = request
        self.step_limiter.changed(request)

    def _plan(self) -> StepLimits:
        """Limits of the next step; a plan that took too long counts all the same.

        Its time is spent by then, and steps are long when the machine is busy: without the cut they
        would be longer still.
        """
        started_s = time.perf_counter()
        answers = self._waiting_answers.values() if self._phase_rules.order else ()
        limits = self.step_limiter.plan(self, answers)
        if time.perf_counter() - started_s > self._time_budget_s:
            self.phase_counters.count(counters.FALLBACK, Fallback.SLOW)
        return limits

    def _is_quiet(self) -> bool:
        """The next step has a token for everybody, and nobody to make room: any order will do."""
        if self.step_limiter.has_prefill(self) or self._phase_order.has_prefilling:
            return False
        if self.early_exit and self.early_exit.probes and self.early_exit.probes.are_next:
            return False
        # Load-bearing: a decode takes its drafts' tokens too, and no more blocks than these.
        rows, drafts = len(self.running), self.num_spec_tokens
        blocks = rows * self._num_kv_groups * (2 + 2 * drafts // self.block_size)
        is_roomy = blocks <= self.kv_cache_manager.block_pool.get_num_free_blocks()
        return is_roomy and rows * (1 + drafts) <= self.max_num_scheduled_tokens

    def _arrange(self) -> ArrivalOrder | None:
        if not self._phase_rules.order:
            return None
        # Load-bearing: nothing in scheduler or model runner depends on the order of `running`
        # but who gets the token budget first and who is preempted (the last, under FCFS).
        self.running, is_in_time = self._phase_order.arrange(self.running)
        if not is_in_time:
            self.phase_counters.count(counters.FALLBACK, Fallback.SLOW)
        if self.policy == SchedulingPolicy.PRIORITY:
            return ArrivalOrder(self.running)
        return None

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        if self._arrivals is not None:
            # Upstream puts it into a heap by arrival time next.
            self._arrivals.restore_one(request)
        if self.early_exit and isinstance(request, ProbeRequest):
            super()._preempt_request(request, *args, **kwargs)
            self.early_exit.probe_displaced(request)
            self._phase_order.forget(request)
            return
        if self._kv_tiers:
            self._kv_tiers.begin_preemption(request)
        try:
            super()._preempt_request(request, *args, **kwargs)
        finally:
            if self._kv_tiers:
                self._kv_tiers.end_free()
        state = self.phase_tracker.get(request.request_id)
        phase = state.phase if state else Phase.ANSWER
        self.phase_counters.count(counters.PREEMPTION, phase)
        if phase is Phase.ANSWER:
            self._waiting_answers[request.request_id] = request
        self.step_limiter.preempted(request, is_answer=phase is Phase.ANSWER)
        self._phase_order.forget(request)

    def get_request_counts(self) -> tuple[int, int]:
        # Load-bearing: data-parallel load, idleness and statistics are told from these two.
        counts = super().get_request_counts()
        return self.early_exit.without_probes(counts) if self.early_exit else counts

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            if self._kv_tiers:
                self._kv_tiers.count_evictions()
            self.step_limiter.tell_steps(self.phase_counters)
            entered, counts = self.phase_tracker.drain_entered(), self.phase_tracker.counts
            payload = self.phase_counters.drain_with(entered.items(), counts.items())
            setattr(stats, stats_field.FIELD, payload or None)
        return stats

    def _watch(self, request: Any, options: RequestOptions) -> None:
        if self.early_exit:
            with self._phase_guard.protect("early exit", request.request_id):
                self.early_exit.added(request, options)
        if self._unavailable_exit:
            with self._phase_guard.protect("early exit", request.request_id):
                self._unavailable_exit.added(request, options)

    def _track(self, request: Any) -> None:
        with self._phase_guard.protect("the phase tracker", request.request_id):
            # Load-bearing: all known tokens of a request, prompt first; accepted ones are appended
            # to this very list.
            self.phase_tracker.add(request.request_id, request._all_token_ids)


def build_phase_scheduler(original: type) -> type:
    """A subclass of the installed synchronous scheduler."""
    stats_field.install()
    return type("PhaseScheduler", (PhaseScheduling, original), {"__module__": __name__})


def build_async_phase_scheduler(original: type) -> type:
    """A subclass of the installed asynchronous scheduler (vLLM's default)."""
    stats_field.install()
    return type("AsyncPhaseScheduler", (PhaseScheduling, original), {"__module__": __name__})
