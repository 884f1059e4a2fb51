"""Names the phase-aware schedulers for ``vllm serve --scheduler-cls``, without any patch.

    vllm serve MODEL --scheduler-cls meridian_patch.engine.scheduler_cls.AsyncPhaseScheduler

Use the asynchronous class, unless ``--no-async-scheduling`` is given.
"""

from collections.abc import Callable

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from meridian_patch.engine.scheduler.scheduler import (
    PhaseScheduling,
    build_async_phase_scheduler,
    build_phase_scheduler,
)


def _phase_class(installed: type, build: Callable[[type], type]) -> type:
    """The installed class if it is phase-aware already, else a phase-aware subclass."""
    return installed if issubclass(installed, PhaseScheduling) else build(installed)


PhaseScheduler = _phase_class(Scheduler, build_phase_scheduler)
AsyncPhaseScheduler = _phase_class(AsyncScheduler, build_async_phase_scheduler)
