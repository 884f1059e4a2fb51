"""Learns how long steps take, and counts steps and the time that the policy takes itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.engine.scheduler.step_timer import StepTimer
from meridian_patch.policy.step_time import StepTimeModel
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

# Step counts are reported in batches of so many, to keep the statistics of each step short.
_REPORTED_STEPS = 64


class StepTiming(SchedulerPart):
    """Teaches the step-time model each step whose time is known.

    Args:
        scheduler: the phase-aware scheduler.
        model: predicts the time of steps.
        phase_counters: count steps, errors of predictions, and the time of the policy.

    Attributes:
        ran_steps: steps with tokens whose outputs arrived.
        learnt_steps: steps among them that the model learnt from.
    """

    name = counters.POLICY

    def __init__(
        self, scheduler: "PhaseScheduling", model: StepTimeModel, phase_counters: PhaseCounters
    ) -> None:
        self.ran_steps = self.learnt_steps = 0
        self._scheduler = scheduler
        self._model = model
        self._counters = phase_counters
        self._timer = StepTimer(model.seconds)
        self._reported_steps = 0, 0
        # Since the last report: seconds of predicted steps, by how much predictions missed them,
        # and seconds of the policy by stage.
        self._predicted_s = self._missed_s = self._limits_s = self._order_s = 0.0

    def after_schedule(
        self, plan: StepPlan, output: "SchedulerOutput", started: Sequence[str]
    ) -> None:
        if plan.ran is not None:
            self._timer.scheduled(output, plan.ran, plan.scheduled_s)
        if plan.is_contended:
            self._limits_s += plan.limits_s
            self._order_s += plan.order_s

    def after_launch(self, output: "SchedulerOutput") -> None:
        self._timer.launched(output, self._scheduler.clock())

    def before_update(
        self, scheduler_output: "SchedulerOutput", model_output: "ModelRunnerOutput"
    ) -> None:
        timed = self._timer.ended(scheduler_output, self._scheduler.clock())
        if not scheduler_output.total_num_scheduled_tokens:
            return
        self.ran_steps += 1
        if timed is None:
            return
        shape, seconds = timed
        predicted_s = self._model.seconds(shape)
        if self._model.observe(shape, seconds):
            self.learnt_steps += 1
            if predicted_s is not None:
                self._predicted_s += seconds
                self._missed_s += abs(predicted_s - seconds)

    def before_stats(self) -> None:
        ran, learnt = self._reported_steps
        if self.ran_steps - ran < _REPORTED_STEPS:
            return
        count, spend = self._counters.count, self._counters.spend
        count(counters.STEP, "ran", self.ran_steps - ran)
        count(counters.STEP, "learnt", self.learnt_steps - learnt)
        count(counters.STEP_SECONDS, "measured", self._predicted_s)
        count(counters.STEP_SECONDS, "error", self._missed_s)
        spend(counters.POLICY_SECONDS, "limits", self._limits_s)
        spend(counters.POLICY_SECONDS, "order", self._order_s)
        self._reported_steps = self.ran_steps, self.learnt_steps
        self._predicted_s = self._missed_s = self._limits_s = self._order_s = 0.0
