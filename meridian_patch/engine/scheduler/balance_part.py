"""Applies the rule ``balance``: a rank's prefill spares the answers of other ranks.

Ranks of a mixture of experts compute each step together: a step takes as long as the slowest rank
needs, so that prefill on one rank delays the answers of all of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.engine.scheduler.rank_exchange import Exchange
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.telemetry import counters

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs


class BalancePart(SchedulerPart):
    """Sends other ranks how many requests answer on this one, and reads theirs.

    Called before the policy, whose step cut heeds answers of other ranks. It reads and sends one
    number and never waits, so it cannot keep a rank from stepping.

    Args:
        scheduler: the phase-aware scheduler.
        exchange: carries the numbers.
        tracker: phases of all requests.
    """

    name = counters.BALANCE

    def __init__(self, scheduler: "Scheduler", exchange: Exchange, tracker: PhaseTracker) -> None:
        self.exchange = exchange
        self._scheduler = scheduler
        self._tracker = tracker
        self._sent = 0

    def before_schedule(self, plan: StepPlan) -> None:
        # If this raises, the step runs as if this rank were alone.
        plan.is_answered_elsewhere = self.exchange.hear() > 0

    def after_schedule(
        self, plan: StepPlan, output: "SchedulerOutput", started: Sequence[str]
    ) -> None:
        self._send(self.answering())

    def after_update(
        self, scheduler_output: "SchedulerOutput", results: "dict[int, EngineCoreOutputs]"
    ) -> None:
        if self._sent and not self.answering():
            # No step may follow in which it would be sent.
            self._send(0)

    def on_switched_off(self) -> None:
        self._send(0)

    def answering(self) -> int:
        """Running requests that answer, 0 where no request reasons. Costs the same at any load."""
        tracker = self._tracker
        if not tracker.num_reasoning:
            return 0
        running, _ = self._scheduler.get_request_counts()
        return int(min(tracker.counts[Phase.ANSWER], running))

    def _send(self, answering: int) -> None:
        self._sent = answering
        self.exchange.tell(answering)
