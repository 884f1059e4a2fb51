"""Keeps the plan of the last step, which the scheduler itself drops behind it."""

from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan


class PlanWatch(SchedulerPart):
    """A part behind all others that decides nothing.

    Attributes:
        plan: of the last step.
    """

    name = "the watch of a test"

    def __init__(self):
        self.plan = StepPlan()

    def after_schedule(self, plan, output, started):
        self.plan = plan


def watch_plans(scheduler):
    """Put a watch on a scheduler of ours."""
    watch = PlanWatch()
    scheduler._parts._parts += (watch,)
    scheduler._parts._find_hooks()
    return watch
