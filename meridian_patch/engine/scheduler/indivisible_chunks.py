"""Computes how many prompt tokens a lowered token budget must still leave room for.

Some prompts are scheduled whole, or in pieces of a least size. Upstream skips such a prompt, and
often all requests behind it, when the step's budget is smaller than that piece. A budget that the
policy lowers must not cause this.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine.request_state import RequestStates
from meridian_patch.engine.scheduler.waiting_order import first
from meridian_patch.engine.upstream import is_release

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

# After so many steps in a row with a lowered budget and no prefill, although prompts could have
# been admitted, one step gets room for a whole prompt. Doubled, up to the maximum, each time that
# this did not help.
_PATIENCE_STEPS = 8
_MOST_PATIENCE_STEPS = 512
# At most so many requests are examined in each queue: there may be many paused sessions.
_MOST_LOOKED_AT = 16


class IndivisibleChunks:
    """Computes the least prefill that a step must have room for.

    1. Chunked prefill off: the whole next prompt.
    2. Mamba state cached at block boundaries (``align``): one block.
    3. Media items that must not be computed in parts: the next item of the next prompt.
    4. Requests whose prompts must not be split at all: the budget is not lowered while one of them
       waits or is being computed.
    5. Anything else that upstream refuses to split and that is not known here: when a lowered
       budget has kept prompts out for some steps, although seats and blocks were free, one step
       gets room for the rest of the next prompt.

    Args:
        scheduler: upstream's scheduler, after its ``__init__``.
        states: records of its requests.

    Attributes:
        least: fewest tokens of a chunk that does not end its prompt; cases 1, 3 and 4 may need
            more.
    """

    def __init__(self, scheduler: "Scheduler", states: RequestStates) -> None:
        config = scheduler.scheduler_config
        full, threshold = scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold
        # The longest chunk that upstream makes with its own budget.
        self._longest_chunk = min(full, threshold) if threshold > 0 else full
        self._is_chunked = config.enable_chunked_prefill
        self._has_whole_media = config.disable_chunked_mm_input
        self._lookahead = scheduler.num_prefill_lookahead
        # Load-bearing: a new request with a single token to compute is padded to a decode with
        # drafts, or waits. A chunk does not end within the lookahead of its prompt's end.
        self.least = max(1 + scheduler.num_spec_tokens, 2 * self._lookahead)
        # Load-bearing: chunks end at block boundaries, and a chunk that reaches none is not made.
        # Blocks longer than the longest chunk are computed in parts.
        block = scheduler.cache_config.block_size
        self._block = 1
        if scheduler.need_mamba_block_aligned_split and block <= self._longest_chunk:
            self._block = block
            self.least = max(self.least, block)
        # Load-bearing: has no side effect; returns the length of a chunk given its upper bound.
        self._split = None
        if scheduler.need_mamba_block_aligned_split:
            self._split = scheduler._mamba_block_aligned_split
        # Case 4: requests that wait, and requests whose prompts are being computed.
        self._waiting, self._running = states.whole_waiting, states.whole_running
        # Case 5.
        self._idle_steps = 0
        self._patience_steps = _PATIENCE_STEPS

    @property
    def may_skip_running(self) -> bool:
        """Whether a lowered budget may skip a running request and leave tokens for others."""
        return self._block > 1 or self._has_whole_media or self._lookahead > 1

    def ran(self, *, has_prefill: bool, is_waited: bool) -> None:
        """Note a scheduled step.

        Args:
            has_prefill: the step computes part of a prompt.
            is_waited: a prompt, or part of one, waits for a later step.
        """
        if has_prefill or not is_waited:
            self._idle_steps, self._patience_steps = 0, _PATIENCE_STEPS
        else:
            self._idle_steps += 1

    def least_prefill(self, scheduler: "Scheduler", prefilling: Sequence[Any]) -> int | None:
        """Prefill tokens that the next step must have room for; None: do not lower its budget.

        Args:
            scheduler: upstream's scheduler.
            prefilling: running requests whose prompts are being computed, the next one first.
        """
        if self._waiting or self._is_any_running():
            return None
        head = first_prompt(scheduler)
        if self._idle_steps:
            if not _has_room(scheduler, head, prefilling):
                # Not the budget but missing seats or blocks keep it out: start counting anew.
                self._idle_steps = 0
            elif self._idle_steps >= self._patience_steps:
                self._idle_steps = 0
                self._patience_steps = min(2 * self._patience_steps, _MOST_PATIENCE_STEPS)
                return _left_of(prefilling[0] if prefilling else head)
        if not self._is_chunked and head is not None:
            # Load-bearing: upstream skips a request that is not ready and takes the next one, whose
            # length is not examined here.
            if not _is_ready(scheduler, head):
                return None
            return max(self.least, _left_of(head))
        if self._has_whole_media:
            return max(self.least, self._media_tokens(head, prefilling))
        return self.least

    def keeps_others_out(self, scheduler: "Scheduler", prefilling: Sequence[Any]) -> bool:
        """Whether a step with a lowered budget must admit no request beside prompts in progress.

        Load-bearing: where a media item that is computed whole does not fit, upstream goes on to
        the next request from 0.33 on, and 0.32 stops. Later ones would keep the item waiting.
        """
        if not (self._has_whole_media and prefilling and is_release("0.33")):
            return False
        head = first_prompt(scheduler)
        return head is not None and bool(head.mm_features)

    def whole_media_tokens(self, request: Request, computed: int, tokens: int) -> int:
        """How long a chunk may be so that it does not end within a media item that begins in it.

        Upstream ensures this when the chunk has text before the item. It would split an item at the
        start of the chunk. Stock splits such an item only when its own chunk ends within it: the
        engine's budget is too small, or Mamba state is cached at a token within the item. Such an
        item is split here too, because no later step computes it whole.

        Args:
            request: the request of the chunk.
            computed: number of tokens before the chunk.
            tokens: length of the chunk so far.
        """
        if not self._has_whole_media:
            return tokens
        end = computed + tokens
        longest_end = None
        for feature in request.mm_features:
            start, stop = feature.mm_position.offset, _end_of(feature.mm_position)
            if start >= end:
                break
            if computed <= start and end < stop:
                if longest_end is None:
                    longest_end = computed + self._uncut_tokens(request, computed)
                if stop <= longest_end:
                    return int(start - computed)
        return tokens

    def _uncut_tokens(self, request: Request, computed: int) -> int:
        """Length of the chunk that upstream would schedule if the request had the step alone."""
        tokens = min(int(request.num_tokens - computed), self._longest_chunk)
        if self._split is None:
            return tokens
        # A waiting request's cached prefix does not count as computed yet.
        return int(self._split(request, tokens, computed - request.num_computed_tokens))

    def _is_any_running(self) -> bool:
        for state in [*self._running]:
            request = state.request
            if not request.is_prefill_chunk or request.status != RequestStatus.RUNNING:
                del self._running[state]
        return bool(self._running)

    def _media_tokens(self, head: Request, prefilling: Sequence[Any]) -> int:
        if prefilling:
            request = prefilling[0]
            computed, known = request.num_computed_tokens, request.num_tokens
            # Load-bearing: a chunk also needs the items that begin within this many tokens of it.
            first = computed + self._lookahead
            ends = (
                min(self._aligned(_end_of(feature.mm_position)), known) - computed
                for feature in request.mm_features
                if computed <= feature.mm_position.offset <= first
            )
        elif head is not None:
            # It is not known yet how much is cached, so any item may be the next one.
            ends = (
                self._aligned(feature.mm_position.length + self._lookahead)
                for feature in head.mm_features or ()
            )
        else:
            return 0
        return max((end for end in ends if end <= self._longest_chunk), default=0)

    def _aligned(self, tokens: int) -> int:
        """The first token count from ``tokens`` on at which a chunk may end within a prompt."""
        return -(-tokens // self._block) * self._block


def _end_of(position: Any) -> int:
    """Index of the first token after a media item."""
    return int(position.offset + position.length)


def must_be_whole(request: Request) -> bool:
    """Whether a prompt must not be split at all."""
    # Load-bearing: the CPU build's model runner V1 raises on a chunk of a request with a seed, and
    # the engine ends. Its random generators have no offset that could be restored.
    sampling = request.sampling_params
    return bool(sampling and sampling.seed is not None and current_platform.is_cpu())


def _left_of(request: Request) -> int:
    """Known tokens that are not computed yet; cached ones are not subtracted."""
    return int(request.num_tokens - request.num_computed_tokens)


def first_prompt(scheduler: "Scheduler") -> Any:
    """Return the waiting request that upstream tries first, or None.

    Requests that hold KV blocks come first. Paused streaming sessions are skipped: they have
    nothing to compute. None also where the first 16 of both queues are paused sessions.
    """
    # Load-bearing: requests that hold blocks come before all others.
    for queue in (scheduler.kv_holding_waiting, scheduler.waiting):
        for request in first(queue, _MOST_LOOKED_AT):
            if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
                return request
    return None


def _is_ready(scheduler: "Scheduler", request: Request) -> bool:
    """Whether upstream would admit the request given room, as far as is known here."""
    has_adapter = scheduler.lora_config and request.lora_request
    is_stale = request.num_stale_output_tokens and not request.drop_stale_output
    is_blocked = scheduler._is_blocked_waiting_status(request.status)
    return not (is_blocked or has_adapter or is_stale)


def _has_room(scheduler: "Scheduler", head: Request, prefilling: Sequence[Any]) -> bool:
    """Whether the next prompt is ready, and seats and blocks suffice for all of it."""
    if scheduler._pause_state != PauseState.UNPAUSED:
        return False
    if prefilling:
        return True
    if head is None or not _is_ready(scheduler, head):
        return False
    if len(scheduler.running) >= scheduler.max_num_active_reqs:
        return False
    blocks = -(-head.num_tokens // scheduler.block_size)
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    return bool(blocks * groups <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
