"""The phase-aware schedulers: vLLM's own, with the queues arranged before each step.

Runs in the EngineCore process. No upstream body is copied: each method calls the hooks of its
parts (see ``parts``) before and after ``super()``, and restores what it changed.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from meridian_patch.config.request_options import NO_OPTIONS, RequestOptions
from meridian_patch.engine import stats_field, status, wire
from meridian_patch.engine.probe_request import ProbeRequest, hide_end
from meridian_patch.engine.request_state import RequestStates
from meridian_patch.engine.scheduler import live_switch
from meridian_patch.engine.scheduler.assembly import assemble
from meridian_patch.engine.scheduler.guard import StepGuard
from meridian_patch.engine.scheduler.live_switch import LiveSwitch
from meridian_patch.engine.scheduler.parts import Applied, StepPlan
from meridian_patch.engine.scheduler.preempted_sessions import known_as_computed, put_back
from meridian_patch.engine.scheduler.prefill_cadence import PrefillCadence
from meridian_patch.engine.scheduler.started_requests import started_requests
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as UpstreamScheduler
else:
    UpstreamScheduler = object

_NO_PLAN = StepPlan()


class PhaseScheduling(UpstreamScheduler):
    """Mixin over vLLM's ``Scheduler`` or ``AsyncScheduler``.

    1. The phase of every request is tracked from its prompt and its accepted tokens.
    2. Before a step, the running requests are put in the policy's order: the first get tokens
       first, the last are preempted first.
    3. The step's token budget and the limit of running requests may be lowered for one step.
    4. A long thinker may be preempted before the step to admit a new request.
    5. Preempted answers resume before other waiting requests.
    6. Thoughts are measured, probed and, in mode ``enforce``, closed.
    7. Without reasoning requests, or with noop and no early exit, every decision is stock's.
    8. If a part fails or takes too long, that is counted and the step runs as stock. A circuit
       breaker switches a part off that fails repeatedly (see ``guard``).
    9. A request has one record, made in ``add_request`` and dropped in ``_free_request``.

    Invariant: requests change queues only as ``super()`` itself moves them.
    """

    running: list[Request]
    # Seconds of a monotonic clock.
    clock: Callable[[], float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = time.monotonic
        self.phase_counters = PhaseCounters()
        self.request_states = RequestStates()
        self._guard = StepGuard(self.phase_counters)
        # The plan of the step that upstream is scheduling.
        self._plan = _NO_PLAN
        # Sessions whose turn ended in the step that upstream is updating, while preempted.
        self._stopped_preempted: list[Request] = []
        self._cadence = PrefillCadence(self)
        built = assemble(
            self, self._guard, self.phase_counters, self._phase_changed, self._end_turn
        )
        self._parts = built.parts
        self.phase_tracker = built.tracker
        self.phase_part = built.phase_part
        self.policy_parts = built.policy
        self.kv_tiers = built.kv_tiers
        self.early_exit = built.early_exit
        self._probes = built.early_exit.probes if built.early_exit else None
        self._refusals = built.policy.refusals
        self._chunks = built.policy.chunks
        self._options_parser = built.options_parser
        self._think_part = built.think_part
        self._metrics = built.metrics
        self.live_switch = LiveSwitch(
            self, built.parts, built.policy, built.started_as, self.phase_counters
        )
        live_switch.install()

    def add_request(self, request: Request) -> None:
        # A session's next chunk is parsed when the session takes it up.
        is_new = request.request_id not in self.requests
        if is_new:
            self.request_states.add(request)
        options = self._accept(request) if is_new else NO_OPTIONS
        super().add_request(request)
        if is_new:
            self._parts.call("on_added", request, options, request_id=request.request_id)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        # Load-bearing: upstream appends the next chunk to the list of known tokens in place. The
        # previous turn's tokens are tracked first, or the chunk would count as its output.
        self._end_turn(session)
        with known_as_computed(session):
            super()._update_request_as_session(session, update)
        # Before it is put into a queue that may be ordered by priority.
        options = self._accept(session)
        if not session.num_computed_tokens and session in self.kv_holding_waiting:
            # It was paused without KV blocks, and waits for some now, ahead of others.
            self.kv_holding_waiting.remove_request(session)
            self.waiting.prepend_request(session)
        name = session.request_id
        self._parts.call("on_session_continued", session, options, request_id=name)

    def _accept(self, request: Request) -> RequestOptions:
        """Parse a request's options; if one is wrong, all of them are ignored."""
        # As `protect`, which takes longer.
        try:
            options = self._options_parser.options_of(request)
        except Exception as error:
            options = NO_OPTIONS
            self._guard.failed("reading vllm_xargs", error, request.request_id)
        self.request_states.of(request).options = options
        self._parts.call("before_added", request, options, request_id=request.request_id)
        return options

    def _end_turn(self, session: Request) -> None:
        self.phase_part.update_phase(session.request_id)
        self._parts.call("on_turn_ended", session, request_id=session.request_id)
        self.request_states.end_turn(self.request_states.of(session))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._switch_off(self._guard.new_step())
        plan = StepPlan()
        # Load-bearing: the engine core asks for a step without prompts at most steps of a prefill
        # cadence (`--prefill-schedule-interval`) that ranks share.
        is_throttled = bool(args[0] if args else kwargs.get("throttle_prefills", False))
        plan.may_prefill = not is_throttled and not self._cadence.is_between_prefills()
        # Load-bearing: a step that could not drain the queue overrules either cadence.
        plan.may_prefill |= getattr(self, "prefill_capacity_bound", False)
        if self._parts.call("before_schedule", plan):
            # The step runs as stock; an admission limit may protect a connector, and stays.
            plan.drop_cut()
        self._cadence.before_step()
        self._plan = plan
        try:
            with Applied(self, plan):
                output = super().schedule(*args, **kwargs)
        finally:
            self._plan = _NO_PLAN
            if self._refusals.is_on:
                self._refusals.stop()
        started = started_requests(output)
        with self._guard.protect(counters.EARLY_EXIT):
            self._cadence.after_step(output, started)
        self._parts.call("after_schedule", plan, output, started)
        return output

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._parts.call("before_update", scheduler_output, model_runner_output)
        result = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        if self._stopped_preempted:
            policy = self.policy_parts
            is_ordered = not (policy.rules.are_all_off or policy.stock_steps.are_all)
            put_back(self, self._stopped_preempted, to_front=is_ordered)
            self._stopped_preempted.clear()
        self._parts.call("after_update", scheduler_output, result)
        return result

    def _holds_kv_blocks(self, request: Request) -> bool:
        # Load-bearing: upstream expects all paused sessions in the queue of those that hold blocks.
        # It passes them over there, and subtracts them from that queue's length. One without blocks
        # was preempted before it was paused.
        is_paused = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        was_preempted = is_paused and request.num_preemptions > 0
        return was_preempted or bool(super()._holds_kv_blocks(request))

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # Load-bearing: upstream asks this first of each request that it may admit, and of none that
        # runs: their blocks are allocated before.
        if self._refusals.is_on:
            with self._guard.protect(counters.POLICY, request.request_id):
                self._refusals.listen(self.kv_cache_manager)
        return bool(super()._handle_blocked_waiting_request(request))

    def _handle_stopped_request(self, request: Request) -> bool:
        is_finished = bool(super()._handle_stopped_request(request))
        if not is_finished and request not in self.running:
            self._stopped_preempted.append(request)
        return is_finished

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        # Load-bearing: the engine core calls this right after it gave the step to the workers.
        self._parts.call("after_launch", scheduler_output)
        grammar = super().get_grammar_bitmask(scheduler_output)
        if self.early_exit and self.early_exit.forced_closes:
            with self._guard.protect(counters.EARLY_EXIT):
                return self.early_exit.forced_closes.add_rows(scheduler_output, grammar)
        return grammar

    def _try_schedule_encoder_inputs(
        self, request: Request, computed: int, tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        # Load-bearing: upstream calls this for every chunk of a request with media, after it cut
        # the chunk to the budget. A chunk of 0 tokens is not scheduled.
        if self._plan.is_cut:
            with self._guard.protect(counters.POLICY, request.request_id):
                tokens = self._chunks.whole_media_tokens(request, computed, tokens)
        return super()._try_schedule_encoder_inputs(request, computed, tokens, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._plan.arrivals is not None:
            # Upstream next puts the request into a heap by arrival time.
            self._plan.arrivals.restore_one(request)
        if isinstance(request, ProbeRequest):
            super()._preempt_request(request, *args, **kwargs)
            self._parts.call("on_probe_preempted", request, request_id=request.request_id)
            return
        self._parts.call("before_preempted", request, request_id=request.request_id)
        if self.kv_tiers:
            self.kv_tiers.begin_preemption(request)
        try:
            super()._preempt_request(request, *args, **kwargs)
        finally:
            if self.kv_tiers:
                self.kv_tiers.end_free()
        self._parts.call("on_preempted", request, request_id=request.request_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if isinstance(request, ProbeRequest):
            self._parts.call("on_probe_freed", request, request_id=request.request_id)
            freed = super()._free_request(request, *args, **kwargs)
            hide_end(self, request)
            return freed
        # Upstream frees a request before `after_update`, so its last tokens are tracked here.
        self.phase_part.update_phase(request.request_id)
        self._parts.call("on_freed", request, request_id=request.request_id)
        try:
            return super()._free_request(request, *args, **kwargs)
        finally:
            self.request_states.drop(request)

    def _connector_finished(self, request: Request) -> Any:
        part = self._think_part
        if part is None:
            return super()._connector_finished(request)
        with part.told_to_connector(request) as facts:
            delays_free, params = super()._connector_finished(request)
        return delays_free, params if facts is None else part.ticket(request, facts, params)

    def _free_blocks(self, request: Request) -> None:
        if self.kv_tiers is None:
            super()._free_blocks(request)
            return
        self.kv_tiers.begin_free(request)
        try:
            super()._free_blocks(request)
        finally:
            self.kv_tiers.end_free()

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if request_ids is not None:
            request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._parts.call("before_finish", request_ids)
        return super().finish_requests(request_ids, *args, **kwargs)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        if reset_running_requests:
            self._parts.call("before_cache_reset")
        return bool(super().reset_prefix_cache(reset_running_requests, *args, **kwargs))

    def get_request_counts(self) -> tuple[int, int]:
        # Load-bearing: vLLM computes data-parallel load, idleness and statistics from these two.
        counts = super().get_request_counts()
        probes = self._probes
        return counts if probes is None else probes.subtract_from(counts)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self._parts.call("before_stats")
            entered, counts = self.phase_tracker.drain_entered(), self.phase_tracker.counts
            payload = self.phase_counters.drain_with(entered.items(), counts.items())
            setattr(stats, wire.COUNTS, payload or None)
            if payload and self._metrics is not None:
                self._metrics.count(payload)
        return stats

    def _phase_changed(self, request_id: str) -> None:
        self._parts.call("on_phase_changed", self.requests[request_id], request_id=request_id)

    def _switch_off(self, names: list[str]) -> None:
        if names:
            self._parts.switch_off(names)
            if counters.EARLY_EXIT in self._parts.off:
                self.early_exit = self._probes = None
            status.publish(parts_off=self._parts.off)


def build_phase_scheduler(original: type) -> type:
    """A phase-aware subclass of vLLM's synchronous scheduler."""
    stats_field.install()
    return type("PhaseScheduler", (PhaseScheduling, original), {"__module__": __name__})


def build_async_phase_scheduler(original: type) -> type:
    """A phase-aware subclass of vLLM's asynchronous scheduler, vLLM's default."""
    stats_field.install()
    return type("AsyncPhaseScheduler", (PhaseScheduling, original), {"__module__": __name__})
