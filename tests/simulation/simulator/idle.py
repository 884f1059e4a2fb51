"""Requests that wait although there is room for them."""

from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

# A step that computes another prompt counts so much: a cut step computes one at a time.
BUSY_SHARE = 1 / 8


class IdleRequests:
    """Counts steps in a row, in one arm.

    The next in line is the first whose LoRA adapter has a place in the step: upstream skips the
    others, which may wait for as long as running requests use all places.

    Attributes:
        steps: by request, up to the last step.
        most_steps: by request, of all times that it waited.
    """

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}
        self.most_steps: dict[str, float] = {}

    def look(self, scheduler: Any, output: Any) -> None:
        """Count a scheduled step."""
        idle = []
        if scheduler._pause_state == PauseState.UNPAUSED:
            idle = [
                request.request_id
                for request in scheduler.running
                if request.request_id not in output.num_scheduled_tokens
                and request.is_prefill_chunk
            ]
            head = next((r for r in scheduler.waiting if _has_adapter(scheduler, r, output)), None)
            if head is not None and _has_room(scheduler, head, output):
                idle.append(head.request_id)
        is_busy = any(
            request.is_prefill_chunk and request.request_id in output.num_scheduled_tokens
            for request in scheduler.running
        )
        share = BUSY_SHARE if is_busy else 1.0
        self.steps = {name: self.steps.get(name, 0) + share for name in idle}
        for name, steps in self.steps.items():
            self.most_steps[name] = max(steps, self.most_steps.get(name, 0))


def _has_room(scheduler: Any, head: Any, output: Any) -> bool:
    """Whether there are tokens, a seat and blocks to spare for the request that is next in line."""
    seats = scheduler.max_num_running_reqs - scheduler.num_waiting_for_streaming_input
    if len(scheduler.running) >= seats - 1 or head.num_stale_output_tokens:
        return False
    if head.status not in {RequestStatus.WAITING, RequestStatus.PREEMPTED}:
        return False
    budget = scheduler.max_num_scheduled_tokens
    spare_tokens = budget - output.total_num_scheduled_tokens
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    num_groups = len(scheduler.kv_cache_config.kv_cache_groups)
    needed = num_groups * (-(-head.num_tokens // scheduler.block_size) + 2)
    slack = len(scheduler.running) * num_groups + needed
    return bool(spare_tokens > min(head.num_tokens, budget // 2) and free > 2 * slack)


def _has_adapter(scheduler: Any, request: Any, output: Any) -> bool:
    """Whether the step has a place for the LoRA adapter; upstream skips a request without."""
    if not scheduler.lora_config or not request.lora_request:
        return True
    used = {
        running.lora_request.lora_int_id
        for running in scheduler.running
        if running.lora_request and running.request_id in output.num_scheduled_tokens
    }
    is_used = request.lora_request.lora_int_id in used
    return is_used or len(used) < scheduler.lora_config.max_loras
