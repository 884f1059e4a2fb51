"""Records what each step of a scheduler computes, and on a real engine how long it takes."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from meridian_patch.replay.types import StepWork


def step_work(scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> StepWork:
    """What the model has to do in a step that was just scheduled.

    Args:
        scheduled: tokens of the step by request id.
        requests: the scheduler's requests.
    """
    prefill_tokens = prefill_seqs = context_tokens = attended_tokens = 0
    for request_id, tokens in scheduled.items():
        # Load-bearing: schedule() has counted the step's tokens as computed already.
        computed = requests[request_id].num_computed_tokens
        context_tokens += computed
        if tokens == 1:
            attended_tokens += computed
        else:
            prefill_seqs += 1
            prefill_tokens += tokens
            attended_tokens += tokens * computed - tokens * (tokens - 1) // 2
    decode_seqs = len(scheduled) - prefill_seqs
    return StepWork(prefill_tokens, decode_seqs, context_tokens, attended_tokens, prefill_seqs)


class StepLog:
    """Wraps ``schedule`` and ``update_from_output`` of one scheduler object.

    A step's time runs from the delivery of the step before, or from its own scheduling when the
    engine was idle, to its own delivery: under asynchronous scheduling too, these times follow
    each other without gaps or overlap.

    Attributes:
        steps: work and seconds of each step, in the order of delivery.
        preemptions: requests preempted so far.
    """

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self.preemptions = 0
        self._scheduler = scheduler
        self._in_flight: deque[tuple[float, StepWork]] = deque()
        self._busy_since: float | None = None
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule = self._logged_schedule
        scheduler.update_from_output = self._logged_update

    def restart(self) -> None:
        """Forget all steps; called while the engine is idle."""
        self.steps, self.preemptions, self._busy_since = [], 0, None

    def _logged_schedule(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        output = self._schedule(*args, **kwargs)
        self.preemptions += len(output.preempted_req_ids or ())
        if output.num_scheduled_tokens:
            work = step_work(output.num_scheduled_tokens, self._scheduler.requests)
            self._in_flight.append((begin, work))
        return output

    def _logged_update(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._update(output, *args, **kwargs)
        if output.num_scheduled_tokens:
            end = time.perf_counter()
            begin, work = self._in_flight.popleft()
            start = begin if self._busy_since is None else self._busy_since
            self.steps.append((work, end - start))
            is_busy = self._scheduler.has_unfinished_requests() or self._in_flight
            self._busy_since = end if is_busy else None
        return result
