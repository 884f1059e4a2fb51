"""Applies the rule ``balance``: a rank's prefill spares the answers of other ranks."""

from collections.abc import Sequence, Sized
from typing import Any, Final

from meridian_patch.config.policy import PolicyConfig
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.engine.scheduler.policy_part import PolicyPart
from meridian_patch.engine.scheduler.rank_exchange import Exchange
from meridian_patch.engine.scheduler.step_limits import StepLimiter
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.rank_balance import AdmissionGate, RankLoad, any_answers
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

# Share of the KV cache in use above which a rank admits requests only when others end.
_FULL_KV_USAGE: Final = 0.95


def build_balance(
    scheduler: Any,
    exchange: Exchange | None,
    config: PolicyConfig,
    tracker: PhaseTracker,
    policy: PolicyPart,
    phase_counters: PhaseCounters,
) -> "BalancePart | None":
    """The part that applies the rule; None: without an exchange with other ranks."""
    if exchange is None:
        return None
    gate = AdmissionGate(config.balance_hold_steps)
    return BalancePart(
        scheduler, exchange, tracker, policy.limiter, gate, policy.waiting_answers, phase_counters
    )


class BalancePart(SchedulerPart):
    """Tells other ranks the load of this one, and hears theirs.

    Called before the policy: what other ranks say limits the step. It reads and sends a few numbers
    and never waits, so it cannot keep a rank from stepping.

    Args:
        scheduler: the phase-aware scheduler.
        exchange: where loads are told and heard.
        tracker: phases of all requests.
        limiter: is told whether other ranks answer.
        gate: holds new requests back.
        waiting_answers: preempted answers; while there are some, no request is held back.
        phase_counters: counts the steps in which it did.
    """

    name = counters.BALANCE

    def __init__(
        self,
        scheduler: Any,
        exchange: Exchange,
        tracker: PhaseTracker,
        limiter: StepLimiter,
        gate: AdmissionGate,
        waiting_answers: Sized,
        phase_counters: PhaseCounters,
    ) -> None:
        self.exchange = exchange
        self._scheduler = scheduler
        self._tracker = tracker
        self._limiter = limiter
        self._gate = gate
        self._waiting_answers = waiting_answers
        self._counters = phase_counters

    def before_schedule(self, plan: StepPlan) -> None:
        # If a later line raises, the step runs as if this rank were alone.
        limiter = self._limiter
        limiter.is_answered_elsewhere = limiter.is_held = False
        own, peers = self.load(), self.exchange.hear()
        limiter.is_answered_elsewhere = any_answers(peers)
        if self._gate.holds(own, peers) and not self._waiting_answers:
            limiter.is_held = True
            # Load-bearing: upstream takes a rank that may begin prefill and leaves requests waiting
            # for one at its capacity, whose next steps `throttle_prefills` does not touch. So the
            # step in which the gate is open is never one that vLLM's cadence closes.
            plan.limit_active(0)
            self._counters.count(counters.LIMITED, "ranks")

    def after_schedule(self, output: Any, started: Sequence[str]) -> None:
        self.exchange.tell(self.load())

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        load = self.load()
        if not load.has_work:
            # No step follows in which it would be told.
            self.exchange.tell(load)

    def on_switched_off(self) -> None:
        self._limiter.is_answered_elsewhere = self._limiter.is_held = False
        self.exchange.tell(RankLoad())

    def load(self) -> RankLoad:
        """The load of this rank now. Costs the same however many requests there are."""
        scheduler, tracker = self._scheduler, self._tracker
        running, waiting = scheduler.get_request_counts()
        # Sessions that wait for their user are among the waiting; they want nothing.
        waiting -= scheduler.num_waiting_for_streaming_input
        is_full = running >= scheduler.max_num_active_reqs
        is_full |= scheduler.kv_cache_manager.usage > _FULL_KV_USAGE
        if not tracker.num_reasoning:
            return RankLoad(0, 0, running, waiting, is_full)
        answering = min(tracker.counts[Phase.ANSWER], running)
        thinking = min(tracker.counts[Phase.THINK], running - answering)
        return RankLoad(answering, thinking, running - answering - thinking, waiting, is_full)
