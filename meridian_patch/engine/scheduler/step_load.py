"""What a step has to compute: before it is planned as far as known, and once it is scheduled."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine.request_state import RequestStates
from meridian_patch.engine.scheduler.indivisible_chunks import first_prompt
from meridian_patch.policy.step_time import StepShape

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler


class StepLoad:
    """Counts tokens of a scheduler's steps.

    Args:
        scheduler: upstream's scheduler.
        states: records of its requests.
        live_probes: the live probes by id, those included that were not scheduled in the step.
        pool_tokens: size of the KV pool.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        states: RequestStates,
        live_probes: Mapping[str, Any],
        pool_tokens: int,
    ) -> None:
        self._scheduler = scheduler
        self._prefilling = states.prefilling
        self._live_probes = live_probes
        self._pool_tokens = pool_tokens
        # With several pipeline stages, each request is in one of so many steps.
        self.stages = int(scheduler.parallel_config.pipeline_parallel_size)

    def num_prefilling(self) -> int:
        """Number of running requests with known tokens that are not computed yet."""
        prefilling = self._prefilling
        if prefilling:
            # Load-bearing: True while a scheduled chunk leaves known tokens uncomputed.
            done = [
                state
                for state in prefilling
                if not state.request.is_prefill_chunk
                or state.request.status != RequestStatus.RUNNING
            ]
            for state in done:
                del prefilling[state]
        return len(prefilling)

    def prompts(self) -> list[Request]:
        """Running requests whose known tokens are being computed, the next one first."""
        return [state.request for state in self._prefilling]

    def prompts_and_probes(self) -> list[Request]:
        """The same, and the probes that the scheduler knows."""
        probes = filter(None, map(self._scheduler.requests.get, self._live_probes))
        return [*self.prompts(), *probes]

    def has_prefill(self) -> bool:
        """Whether any running or waiting request has known tokens that are not computed yet."""
        scheduler = self._scheduler
        # Load-bearing: waiting requests that hold blocks (KV that was loaded, or the next chunk of
        # a session) are in this separate queue, and so are paused sessions.
        holding = len(scheduler.kv_holding_waiting) - scheduler.num_waiting_for_streaming_input
        return bool(scheduler.waiting) or holding > 0 or self.num_prefilling() > 0

    def decodes(self) -> StepShape:
        """The next step's decode tokens and KV context."""
        scheduler = self._scheduler
        held = int(scheduler.kv_cache_manager.usage * self._pool_tokens)
        rows = len(scheduler.running) - self.num_prefilling() - len(self._live_probes)
        tokens = rows = max(rows, 0)
        if self.stages > 1:
            due = _due_of(scheduler)
            held = held * len(due) // max(rows, 1)
            tokens = sum(due)
        elif scheduler.num_spec_tokens:
            # Load-bearing: a request's drafts are computed in the step after they were made.
            tokens += sum([len(request.spec_token_ids) for request in scheduler.running])
        return StepShape(0, tokens, held)

    def tokens_before_prefill(self) -> int:
        """Upper bound of the number of tokens before the next prompt chunk."""
        for state in self._prefilling:
            return int(state.request.num_computed_tokens)
        head = first_prompt(self._scheduler)
        if head is None:
            return 0
        # How much of a prompt is cached is known before scheduling only if it holds blocks. This
        # assumes that all of it is, which is common after a preemption. If nothing is cached, the
        # first chunk is smaller than necessary.
        return int(head.num_computed_tokens or head.num_tokens)

    def of(self, output: "SchedulerOutput", planned: StepShape) -> StepShape | None:
        """The work of a step that was just scheduled; None for one without tokens.

        Args:
            output: what upstream scheduled.
            planned: what was known of it before.
        """
        total = output.total_num_scheduled_tokens
        if not total:
            return None
        tokens_of = output.num_scheduled_tokens
        prefill = probed = attended = 0
        for state in self._prefilling:
            tokens = tokens_of.get(state.request.request_id, 0)
            prefill += tokens
            attended += _attended(state.request, tokens)
        for name in self._live_probes:
            tokens = tokens_of.get(name, 0)
            if tokens:
                probed += tokens
                attended += _attended(self._scheduler.requests[name], tokens)
        decodes = total - prefill - probed
        return StepShape(prefill, decodes, planned.context_tokens, attended, probed)


def _attended(request: Request, tokens: int) -> int:
    """Number of tokens attended to, summed over the tokens of a chunk just scheduled."""
    # Load-bearing: the scheduled tokens already count as computed.
    return tokens * (2 * request.num_computed_tokens - tokens + 1) // 2


def _due_of(scheduler: "Scheduler") -> list[int]:
    """Tokens per request that decodes in the next step."""
    next_step = scheduler.current_step + 1
    # Load-bearing: with pipeline parallelism a request whose last token is still in flight has
    # nothing to compute or is not eligible. The others compute one token and their drafts.
    return [
        1 + len(request.spec_token_ids)
        for request in scheduler.running
        if not request.is_prefill_chunk
        and request.next_decode_eligible_step <= next_step
        and request.num_tokens_with_spec + request.num_output_placeholders
        > request.num_computed_tokens
    ]
