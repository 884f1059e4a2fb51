"""Names the phase-aware schedulers for ``vllm serve --scheduler-cls``, without any patch.

    vllm serve MODEL --scheduler-cls meridian_patch.engine.scheduler_cls.AsyncPhaseScheduler

Use the asynchronous class, unless ``--no-async-scheduling`` is given. With ``MERIDIAN_PATCH=0``
both names stand for vLLM's own classes.
"""

from collections.abc import Callable
from typing import Final

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from meridian_patch import envs

_IS_OFF: Final = envs.activation(envs.environment()) is False

if _IS_OFF:
    # Nothing of ours is imported, so that nothing of ours can keep the engine from starting.
    init_logger("vllm.meridian_patch").warning(
        "MERIDIAN_PATCH is 0: --scheduler-cls runs vLLM's own scheduler"
    )
    PhaseScheduler, AsyncPhaseScheduler = Scheduler, AsyncScheduler
else:
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
