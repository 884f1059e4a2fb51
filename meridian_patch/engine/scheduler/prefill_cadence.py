"""vLLM's own prefill cadence, ``--prefill-schedule-interval``, which it has from 0.33 on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine.probe_request import ProbeRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class PrefillCadence:
    """Tells which steps may compute prompts; a probe does not put the next one off.

    Load-bearing: a step that computes prompt tokens restarts the cadence (``last_prefill_step``),
    which counts the steps that have tokens (``num_executed_steps``). A scheduler without these
    attributes has no cadence of its own.

    Args:
        scheduler: vLLM's.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._interval = int(getattr(scheduler, "local_prefill_interval", 1))
        self._last = 0
        # Requests whose prompts were under way before the step: users' ones, and probes.
        self._prompts: list[Any] = []
        self._probes: list[Any] = []

    def is_between_prefills(self) -> bool:
        """Whether the next step may compute no prompt beside decodes."""
        if self._interval <= 1:
            return False
        scheduler = self._scheduler
        next_step = scheduler.num_executed_steps + 1
        is_early = next_step - scheduler.last_prefill_step < self._interval
        return is_early and any(not request.is_prefill_chunk for request in scheduler.running)

    def before_step(self) -> None:
        """Note which prompts are under way."""
        if self._interval <= 1:
            return
        self._last = self._scheduler.last_prefill_step
        chunks = [each for each in self._scheduler.running if each.is_prefill_chunk]
        self._probes = [each for each in chunks if isinstance(each, ProbeRequest)]
        self._prompts = [each for each in chunks if not isinstance(each, ProbeRequest)]

    def after_step(self, output: Any, started: Sequence[str]) -> None:
        """Take the restart of the cadence back where probes alone computed prompts.

        Args:
            output: vLLM's ``SchedulerOutput``.
            started: ids of the requests that it begins or resumes.
        """
        scheduler = self._scheduler
        if self._interval <= 1 or scheduler.last_prefill_step == self._last:
            return
        scheduled = output.num_scheduled_tokens
        begun = [scheduler.requests[name] for name in started]
        begun = [each for each in begun if _computes_prompt(each, scheduled[each.request_id])]
        probes = [each for each in begun if isinstance(each, ProbeRequest)]
        # Load-bearing: a prompt that was in the step and was preempted in it restarts the cadence.
        is_users = len(begun) > len(probes) or any(
            each.request_id in scheduled or each.status == RequestStatus.PREEMPTED
            for each in self._prompts
        )
        is_probes = any(each.request_id in scheduled for each in [*probes, *self._probes])
        if is_probes and not is_users:
            scheduler.last_prefill_step = self._last


def _computes_prompt(request: Request, num_scheduled: int) -> bool:
    # Load-bearing: upstream has counted the step's tokens as computed, and restarts the cadence for
    # a request that had more than its last known token left.
    before = request.num_computed_tokens - num_scheduled
    return bool(before < request.num_tokens - 1)
