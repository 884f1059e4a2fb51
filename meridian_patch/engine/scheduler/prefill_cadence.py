"""vLLM's own prefill cadence, ``--prefill-schedule-interval``, which it has from 0.33 on."""

from collections.abc import Sequence
from typing import Any

from meridian_patch.engine.early_exit.probe_request import ProbeRequest


class PrefillCadence:
    """Tells which steps may compute prompts; a probe does not put the next one off.

    Load-bearing: a step that computes prompt tokens restarts the cadence (``last_prefill_step``),
    which counts the steps that have tokens (``num_executed_steps``). A scheduler without these
    attributes has no cadence of its own.

    Args:
        scheduler: vLLM's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._interval = int(getattr(scheduler, "local_prefill_interval", 1))
        self._last = 0
        # Users' requests whose prompts were under way before the step.
        self._chunks: tuple[str, ...] = ()

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
        if self._interval > 1:
            self._last = self._scheduler.last_prefill_step
            self._chunks = tuple(
                request.request_id
                for request in self._scheduler.running
                if request.is_prefill_chunk and not isinstance(request, ProbeRequest)
            )

    def after_step(self, output: Any, started: Sequence[str]) -> None:
        """Take the restart of the cadence back where only probes computed prompts.

        Args:
            output: vLLM's ``SchedulerOutput``.
            started: ids of the requests that it begins or resumes.
        """
        scheduler = self._scheduler
        if self._interval <= 1 or scheduler.last_prefill_step == self._last:
            return
        scheduled = output.num_scheduled_tokens
        if any(name in scheduled for name in self._chunks):
            return
        if not any(self._computes_prompt(name, scheduled[name]) for name in started):
            scheduler.last_prefill_step = self._last

    def _computes_prompt(self, name: str, num_scheduled: int) -> bool:
        request = self._scheduler.requests[name]
        if isinstance(request, ProbeRequest):
            return False
        # Load-bearing: upstream has counted the step's tokens as computed.
        before = request.num_computed_tokens - num_scheduled
        return bool(before < request.num_tokens - 1)
