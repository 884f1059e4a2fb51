"""Looks at what goes into a scheduler of ours and what comes out, step by step."""

import hashlib
from collections.abc import Callable
from typing import Any

from plan_watch import watch_plans
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from meridian_patch.engine.kv_cache.shared_blocks import held_tokens
from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.phase.tracker import Phase
from simulator.engine import Arm, Watch
from simulator.failure import Failure
from simulator.faults import Faults
from simulator.idle import IdleRequests
from simulator.invariants import (
    check_blocks,
    check_counts,
    check_health,
    check_phases,
    check_places,
    check_tables,
)
from simulator.worker import Step

# Steps in a row in which a request may wait although there is room for it.
PATIENCE_STEPS = 120
# Steps within which a request comes in where room was made; a cut may put it off.
ROOM_STEPS = 8
# Of the steps in which something ran, the share that the step-time model learns from.
LEAST_LEARNT = 0.9
_FEWEST_STEPS = 60
# Of predicted seconds: a step's true length follows from its tokens here.
MOST_ERROR = 0.25
# After so many times ``drain_s`` in which every step was cut, prefill makes steps so much longer.
PATIENCE_DRAINS, LEAST_STRETCH = 8, 1.25
_LONGEST_STEP_S = 0.1


def digest_of(output: Any) -> bytes:
    """Everything that a step tells the workers and that decisions show in."""
    cached = output.scheduled_cached_reqs
    parts = (
        list(output.num_scheduled_tokens.items()),
        [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs],
        list(zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)),
        sorted(cached.resumed_req_ids),
        sorted(output.finished_req_ids),
        sorted(output.preempted_req_ids or ()),
        list(output.scheduled_spec_decode_tokens.items()),
        list(output.scheduled_encoder_inputs.items()),
    )
    return hashlib.sha256(repr(parts).encode()).digest()


class Recorder(Watch):
    """Keeps a digest of each step, which is what an arm decided, and who waits with room."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.idle = IdleRequests()

    def schedule(self, arm: Arm) -> Any:
        output = super().schedule(arm)
        self.digests.append(digest_of(output))
        self.idle.look(arm.scheduler, output)
        return output


class Checker(Recorder):
    """All invariants that can be seen in a single arm of ours.

    Args:
        arm: ours.
        faults: of this arm.
        stock: what was kept of vLLM's own scheduler on the same seed.
    """

    def __init__(self, arm: Arm, faults: Faults, stock: Recorder) -> None:
        super().__init__()
        self._stock = stock
        self._arm = arm
        self._faults = faults
        self._is_scheduling = False
        self._expects_health = not arm.case.has_fault("raises")
        scheduler = arm.scheduler
        rules = scheduler.policy_parts.rules
        self._is_answers_first = (
            rules.order and arm.case.queue == "fcfs" and not arm.case.has_fault("raises")
        )
        self._steered: dict[int, bool] = {}
        # Steps in which a request thought, had thought or was to think.
        self.num_reasoning = 0
        self.num_steered = 0
        self.num_learnt = 0
        # Steps' first chunks of requests that no user sent.
        self.num_probes = 0
        # Displaced by us since the step began, with who stood first then.
        self._preempted_for_room: list[Any] = []
        self.num_preempted_for_room = 0
        # Those that made room for a request that has not come in, and since which step.
        self._made_room: set[str] = set()
        self._made_room_step = 0
        # The first failure of each kind that a run can go on after.
        self.failures: dict[str, str] = {}
        # Seconds for which every step was cut, and when the last step was scheduled.
        self._cut_for_s, self._cut_at_s = 0.0, 0.0
        self._is_probe_due: dict[str, int] = {}
        # Predicted and true seconds of steps that only decode.
        self._predictions: list[tuple[float, float]] = []
        self._plans = watch_plans(scheduler)
        self._wrap(scheduler)

    def note(self, failure: Failure) -> None:
        """An invariant is broken; the run goes on, to see what else is."""
        self.failures.setdefault(
            failure.invariant, f"{failure.message} (step {self._arm.num_steps})"
        )

    def _soft(self, check: Callable[..., None], *args: Any) -> None:
        try:
            check(*args)
        except Failure as failure:
            self.note(failure)

    def schedule(self, arm: Arm) -> Any:
        scheduler = arm.scheduler
        is_reasoning = bool(scheduler.phase_tracker.num_reasoning)
        self.num_reasoning += is_reasoning
        is_off = self._is_switched_off
        if is_off:
            self._made_room.clear()
        is_steered = is_reasoning and not (scheduler.policy_parts.rules.are_all_off or is_off)
        answers = self._waiting_answers()
        # Load-bearing: requests that wait with blocks of their own come in before all others.
        holding = {request.request_id for request in scheduler.kv_holding_waiting}
        self._preempted_for_room.clear()
        self._is_scheduling = True
        try:
            output = super().schedule(arm)
        finally:
            self._is_scheduling = False
        self._steered[id(output)] = is_steered
        if self._is_answers_first and is_steered:
            self._soft(self._check_waiting_answers, output, answers, holding)
        if is_off:
            self._soft(self._check_switched_off)
        self._soft(self._check_displacing, output)
        self._soft(self._check_idle)
        self._soft(self._check_probes, output)
        self._soft(self._check_throttle, output)
        self.num_probes += sum(
            n.req_id not in arm.ledger.records for n in output.scheduled_new_reqs
        )
        if is_steered and self._expects_health:
            self._predict(output)
        return output

    def update(self, arm: Arm, step: Step) -> dict[int, Any]:
        before = self.num_learnt
        outputs = super().update(arm, step)
        is_steered = self._steered.pop(id(step.output))
        if is_steered and step.output.total_num_scheduled_tokens:
            self.num_steered += 1
        elif self.num_learnt > before:
            self.num_learnt = before
        return outputs

    def after_tick(self) -> None:
        """A tick is over."""
        arm = self._arm
        check_places(arm)
        self._soft(check_counts, arm)
        check_blocks(arm)
        if self._expects_health:
            for check in (check_health, check_tables, check_phases):
                self._soft(check, arm)

    def at_end(self) -> None:
        """The arm is drained."""
        if self.num_steered >= _FEWEST_STEPS and self._expects_health:
            share = self.num_learnt / self.num_steered
            if share < LEAST_LEARNT and self._arm.scheduler.policy_parts.rules.step_cut:
                message = f"{self.num_learnt} of {self.num_steered} steps"
                self.note(Failure("learning", f"the step-time model learnt from {message}"))
        late = self._predictions[len(self._predictions) // 2 :]
        if len(late) >= _FEWEST_STEPS:
            error = sum(abs(guess - truth) / truth for guess, truth in late) / len(late)
            if error > MOST_ERROR:
                message = f"steps that decode are predicted {error:.0%} wrong"
                self.note(Failure("prediction", message))

    def _wrap(self, scheduler: Any) -> None:
        observe, preempt = scheduler.policy_parts.model.observe, scheduler._preempt_request

        def observed(*args: Any, **kwargs: Any) -> Any:
            self.num_learnt += 1
            return observe(*args, **kwargs)

        def preempted(request: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_scheduling:
                self._soft(self._check_preemption, request)
            return preempt(request, *args, **kwargs)

        scheduler.policy_parts.model.observe = observed
        scheduler._preempt_request = preempted

    def _check_preemption(self, request: Any) -> None:
        """Invariant 5: no answer makes room while a thinker or a prompt holds blocks."""
        scheduler = self._arm.scheduler
        state = scheduler.phase_tracker.get(request.request_id)
        is_ours = scheduler.max_num_scheduled_tokens and self._is_before_upstream()
        if is_ours and not isinstance(request, ProbeRequest):
            self._preempted_for_room.append(request)
            self.num_preempted_for_room += 1
        if not self._is_answers_first or state is None or state.phase is not Phase.ANSWER:
            return
        if self._is_switched_off:
            return
        if not scheduler.phase_tracker.num_reasoning:
            return
        for other in scheduler.running:
            phase = scheduler.phase_tracker.get(other.request_id)
            is_lesser = phase is not None and phase.phase is not Phase.ANSWER
            if is_lesser and other is not request:
                raise Failure(
                    "answers",
                    f"{request.request_id} answers and is preempted while {other.request_id} in "
                    f"phase {phase.phase} runs",
                )

    @property
    def _is_switched_off(self) -> bool:
        """Whether the policy was switched off while the engine runs."""
        return self._faults.is_policy_off

    def _check_switched_off(self) -> None:
        """Invariant 7: a policy that is switched off arranges no step."""
        plan = self._plans.plan
        if self._preempted_for_room:
            names = [request.request_id for request in self._preempted_for_room]
            raise Failure("switch", f"{names} made room though the policy is off")
        if plan.token_budget is not None:
            raise Failure("switch", f"a step is cut to {plan.token_budget} though it is off")
        if self._arm.scheduler.request_states.held:
            raise Failure("switch", "thinkers are held for room though the policy is off")

    def _is_before_upstream(self) -> bool:
        """Whether upstream's part of the step has not begun."""
        return bool(self._arm.scheduler.current_step == self._arm.num_steps)

    def _preempted_answers(self) -> list[Any]:
        """Answers that wait, those included that upstream may pass over."""
        scheduler = self._arm.scheduler
        answers = []
        for request in scheduler.waiting:
            state = scheduler.phase_tracker.get(request.request_id)
            is_answer = state is not None and state.phase is Phase.ANSWER
            if is_answer and request.status == RequestStatus.PREEMPTED:
                answers.append(request)
        return answers

    def _waiting_answers(self) -> list[Any]:
        """Answers that wait for nothing but room."""
        return [
            request
            for request in self._preempted_answers()
            if not request.num_stale_output_tokens
            and not request.lora_request
            and not request.has_encoder_inputs
        ]

    def _check_waiting_answers(self, output: Any, answers: list[Any], holding: set[str]) -> None:
        """Invariant 5: no request is admitted before an answer that waits.

        But for one that waits with blocks of its own, such as a session whose next chunk is there:
        upstream keeps a queue of those, and looks at no other before it is empty. The blocks that
        the answer lacks may be theirs.
        """
        left = [each for each in answers if each.status == RequestStatus.PREEMPTED]
        if not left or self._arm.case.connector != "none":
            return
        scheduler = self._arm.scheduler
        names = [new.req_id for new in output.scheduled_new_reqs]
        names += list(output.scheduled_cached_reqs.resumed_req_ids)
        for name in names:
            state = scheduler.phase_tracker.get(name)
            if name not in holding and state is not None and state.phase is not Phase.ANSWER:
                raise Failure(
                    "answers",
                    f"{name} in phase {state.phase} comes in while the answer "
                    f"{left[0].request_id} waits",
                )

    def _check_displacing(self, output: Any) -> None:
        """Invariant 4: a request that makes room makes it for one that comes in soon."""
        scheduler = self._arm.scheduler
        gone = {request.request_id for request in self._preempted_for_room}
        if gone and not self._made_room:
            self._made_room_step = self._arm.num_steps
        self._made_room |= gone
        # One whose last token ended its thought after it made room comes in as an answer.
        self._made_room -= {name for name in self._made_room if self._answers(name)}
        if not self._made_room:
            return
        came = {new.req_id for new in output.scheduled_new_reqs}
        came |= set(output.scheduled_cached_reqs.resumed_req_ids)
        is_loading = any(
            r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in scheduler.kv_holding_waiting
        )
        # What a connector has of a request, it may say later: upstream passes the request over.
        is_loading |= self._arm.case.connector == "load" and any(
            r.status == RequestStatus.WAITING for r in scheduler.deferred_waiting
        )
        is_paused = scheduler._pause_state != PauseState.UNPAUSED
        soon = ROOM_STEPS * self._arm.case.cadence
        if came - self._made_room or is_loading or is_paused or not scheduler.waiting:
            self._made_room.clear()
        elif came or self._arm.num_steps - self._made_room_step >= soon:
            names = sorted(self._made_room)
            self._made_room.clear()
            raise Failure("displacing", f"{names} made room and no request came in")

    def _answers(self, name: str) -> bool:
        state = self._arm.scheduler.phase_tracker.get(name)
        return state is not None and state.phase is Phase.ANSWER

    def _holds_prefix(self, probes: Any, due: Any) -> bool:
        cached = probes._num_cached(due.prefix_tokens)
        manager = self._arm.scheduler.kv_cache_manager
        return not probes._holds_all or held_tokens(manager, due.parent, cached + 1) >= cached

    def _check_probes(self, output: Any) -> None:
        """Invariant 4, of probes: with a seat, tokens and blocks to spare one is made.

        Not while an answer waits, whatever it waits for: probes are put off for all of them, those
        with images and LoRA adapters too. And under vLLM's priority policy a probe has the priority
        of its parent, and stands behind a request of a higher one that finds no room. A prefix that
        is cached twice may be found where no request holds it, and costs free blocks then.
        """
        scheduler = self._arm.scheduler
        probes = scheduler.early_exit.probes if scheduler.early_exit else None
        if probes is None:
            return
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        is_roomy = (
            len(scheduler.running) < scheduler.max_num_running_reqs - 1
            and free > 4 + 2 * len(scheduler.running)
            and output.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens - 70
            and not self._preempted_answers()
            and scheduler._pause_state == PauseState.UNPAUSED
        )
        if not is_roomy:
            self._is_probe_due.clear()
            return
        is_by_priority = scheduler.policy == SchedulingPolicy.PRIORITY
        first = scheduler.waiting.peek_request() if is_by_priority and scheduler.waiting else None
        ready = [
            name
            for name, due in probes.due.items()
            if probes._is_ready(due)
            and not (first is not None and first.priority < due.parent.priority)
            and self._holds_prefix(probes, due)
        ]
        self._is_probe_due = {name: self._is_probe_due.get(name, 0) + 1 for name in ready}
        for name, steps in self._is_probe_due.items():
            if steps > PATIENCE_STEPS:
                raise Failure("probes", f"a probe of {name} is due for {steps} steps with room")

    def _check_throttle(self, output: Any) -> None:
        """Invariant 4: where prompts wait for long, no request's wish keeps all of them out."""
        arm, scheduler = self._arm, self._arm.scheduler
        budget, total = scheduler.max_num_scheduled_tokens, output.total_num_scheduled_tokens
        chunks = [r for r in scheduler.running if r.is_prefill_chunk]
        backlog = sum(request.num_tokens - request.num_computed_tokens for request in chunks)
        is_cut = (
            scheduler._pause_state == PauseState.UNPAUSED
            and arm.case.images == "none"
            and arm.case.long_prefill == 0
            and arm.case.cache != "hybrid"
            and 0 < total < min(budget, total + backlog) - arm.case.block
            and any(request.request_id in output.num_scheduled_tokens for request in chunks)
        )
        # A step that stalls is no long row of short ones.
        step_s = min(arm.clock.now - self._cut_at_s, _LONGEST_STEP_S)
        self._cut_at_s = arm.clock.now
        if not is_cut:
            self._cut_for_s = 0.0
            return
        self._cut_for_s += step_s
        waited_s = self._cut_for_s
        # Of prompts' last chunks too, after which they decode.
        names, drafts = {r.request_id for r in chunks}, output.scheduled_spec_decode_tokens
        prefill = sum(
            tokens
            for name, tokens in output.num_scheduled_tokens.items()
            if name in names or tokens > 1 + len(drafts.get(name, ()))
        )
        is_little = arm.seconds(total) < LEAST_STRETCH * arm.seconds(total - prefill)
        drain_s = scheduler.policy_parts.cut._cut._settings.drain_s
        if is_little and waited_s > PATIENCE_DRAINS * drain_s:
            raise Failure(
                "throttle",
                f"prompts wait for {waited_s:.1f} s with {prefill} prefill tokens per step",
            )

    def _predict(self, output: Any) -> None:
        scheduler = self._arm.scheduler
        new = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        most = 1 + self._arm.case.drafts
        if new or not output.num_scheduled_tokens:
            return
        if (
            max(output.num_scheduled_tokens.values()) > most
            or scheduler.policy_parts.load.num_prefilling()
        ):
            return
        guess = scheduler.policy_parts.model.decode_seconds(self._plans.plan.shape)
        if guess is not None:
            truth = self._arm.seconds(output.total_num_scheduled_tokens)
            self._predictions.append((guess, truth))

    def _check_idle(self) -> None:
        """Invariant 4: with tokens, seats and blocks to spare no request waits for long.

        But where it does in stock on the same seed, as one whose prefix another one computes.
        """
        # With pipeline parallelism a request gets a token in one of so many steps.
        patience = PATIENCE_STEPS * self._arm.case.stages
        for name, steps in self.idle.steps.items():
            if steps > max(patience, 2 * self._stock.idle.most_steps.get(name, 0)):
                raise Failure("progress", f"{name} waits for {steps:.0f} steps with room for it")
