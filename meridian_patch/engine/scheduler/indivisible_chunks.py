"""Prompts that are scheduled whole or in whole pieces: what a step's cut must leave room for.

Upstream passes a prompt over, and often all that wait behind it, when the step's budget is smaller
than the least piece that it may schedule. A budget that we cut must not be the reason.
"""

from collections.abc import Sequence
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from meridian_patch.engine.scheduler.waiting_order import first

# Steps in a row under a cut that took up no prefill although prompts could have come in, after
# which one step has room for a whole prompt; doubled, up to the most, each time that this brought
# nothing.
_PATIENCE_STEPS = 8
_MOST_PATIENCE_STEPS = 512
# Waiting requests that are looked at in each queue: paused sessions may be many.
_MOST_LOOKED_AT = 16


class IndivisibleChunks:
    """The least prefill that a step must have room for.

    1. Chunked prefill off: the whole next prompt.
    2. Mamba state cached at block boundaries (``align``): one block.
    3. Media items that must not be computed in parts: the next item of the next prompt.
    4. Requests whose prompts must not be computed in parts at all: no cut while one of them waits
       or is being computed.
    5. Whatever else upstream refuses to cut, which is not known here: when a cut has kept prompts
       out for some steps, though there were seats and blocks for them, one step has room for all
       that is left of the next one.

    Args:
        scheduler: upstream's, initialised.

    Attributes:
        least: fewest tokens of any prompt's chunk that does not end the prompt; cases 1, 3 and 4
            may ask for more.
    """

    def __init__(self, scheduler: Any) -> None:
        config = scheduler.scheduler_config
        full, threshold = scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold
        # The longest chunk that upstream makes without us.
        self._longest_chunk = min(full, threshold) if threshold > 0 else full
        self._is_chunked = config.enable_chunked_prefill
        self._has_whole_media = config.disable_chunked_mm_input
        self._lookahead = scheduler.num_prefill_lookahead
        # Load-bearing: a new request that has but one token to compute is padded to a decode with
        # drafts, or waits; a chunk does not end within the lookahead of its prompt's end.
        self.least = max(1 + scheduler.num_spec_tokens, 2 * self._lookahead)
        # Load-bearing: chunks end at block boundaries, and there is no chunk if none is reached.
        # Longer blocks than chunks are computed in parts.
        block = scheduler.cache_config.block_size
        self._block = 1
        if scheduler.need_mamba_block_aligned_split and block <= self._longest_chunk:
            self._block = block
            self.least = max(self.least, block)
        # Load-bearing: changes nothing; how long a chunk that may have so many tokens is.
        self._split = None
        if scheduler.need_mamba_block_aligned_split:
            self._split = scheduler._mamba_block_aligned_split
        # Of case 4: ids of those that wait, and those whose prompts are being computed.
        self._waiting: set[str] = set()
        self._running: list[Any] = []
        # Of case 5.
        self._idle_steps = 0
        self._patience_steps = _PATIENCE_STEPS

    @property
    def may_pass_over(self) -> bool:
        """Whether a cut step may leave a running request out and have tokens left for others."""
        return self._block > 1 or self._has_whole_media or self._lookahead > 1

    def waits(self, request: Any) -> None:
        """The request is new, or was preempted."""
        if _must_be_whole(request):
            self._waiting.add(request.request_id)

    def begins(self, request: Any) -> None:
        """The request is in a step, and its known tokens are being computed."""
        if request.request_id in self._waiting:
            self._waiting.discard(request.request_id)
            self._running.append(request)

    def left(self, request: Any) -> None:
        """The request is gone; unknown ones are fine."""
        self._waiting.discard(request.request_id)

    def ran(self, *, has_prefill: bool, is_waited: bool) -> None:
        """A step was scheduled.

        Args:
            has_prefill: it computes part of a prompt.
            is_waited: a prompt, or part of one, waits for a later step.
        """
        if has_prefill or not is_waited:
            self._idle_steps, self._patience_steps = 0, _PATIENCE_STEPS
        else:
            self._idle_steps += 1

    def least_prefill(self, scheduler: Any, prefilling: Sequence[Any]) -> int | None:
        """Tokens of prefill that the next step must have room for; None: it must not be cut.

        Args:
            scheduler: upstream's.
            prefilling: running requests whose prompts are being computed, the next one first.
        """
        if self._waiting or self._is_any_running():
            return None
        head = first_prompt(scheduler)
        if self._idle_steps:
            if not _has_room(scheduler, head, prefilling):
                # The cut is not what keeps it out. When there is room again it has a cut step.
                self._idle_steps = 0
            elif self._idle_steps >= self._patience_steps:
                self._idle_steps = 0
                self._patience_steps = min(2 * self._patience_steps, _MOST_PATIENCE_STEPS)
                return _left_of(prefilling[0] if prefilling else head)
        if not self._is_chunked and head is not None:
            # Load-bearing: a request that is not ready is passed over, and the one behind it, whose
            # length is not looked at here, comes first.
            if not _is_ready(scheduler, head):
                return None
            return max(self.least, _left_of(head))
        if self._has_whole_media:
            return max(self.least, self._media_tokens(head, prefilling))
        return self.least

    def whole_media_tokens(self, request: Any, computed: int, tokens: int) -> int:
        """How long a chunk may be, so that it ends in no media item that begins within it.

        Upstream sees to it where text stands before the item in the chunk. An item that is the
        chunk's first would be cut. Stock cuts it only where its own chunk ends within the item: the
        engine's budget is too small, or Mamba state is cached at a place within the item. Such an
        item is cut here too, because no later step computes it whole.

        Args:
            request: that the chunk is of.
            computed: tokens that stand before the chunk.
            tokens: that the chunk would have.
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

    def _uncut_tokens(self, request: Any, computed: int) -> int:
        """Tokens of the chunk that upstream would make of a request in a step of its own."""
        tokens = min(int(request.num_tokens - computed), self._longest_chunk)
        if self._split is None:
            return tokens
        # A waiting request's cached prefix does not count as computed yet.
        return int(self._split(request, tokens, computed - request.num_computed_tokens))

    def _is_any_running(self) -> bool:
        if self._running:
            self._running = [
                request
                for request in self._running
                if request.is_prefill_chunk and request.status == RequestStatus.RUNNING
            ]
        return bool(self._running)

    def _media_tokens(self, head: Any, prefilling: Sequence[Any]) -> int:
        if prefilling:
            request = prefilling[0]
            computed, known = request.num_computed_tokens, request.num_tokens
            # Load-bearing: upstream looks so many tokens ahead for items that a chunk needs.
            first = computed + self._lookahead
            ends = (
                min(self._aligned(_end_of(feature.mm_position)), known) - computed
                for feature in request.mm_features
                if computed <= feature.mm_position.offset <= first
            )
        elif head is not None:
            # How much of it is cached, and with which item it goes on, is not known yet.
            ends = (
                self._aligned(feature.mm_position.length + self._lookahead)
                for feature in head.mm_features or ()
            )
        else:
            return 0
        return max((end for end in ends if end <= self._longest_chunk), default=0)

    def _aligned(self, tokens: int) -> int:
        """The first place at or behind this one where a chunk may end within a prompt."""
        return -(-tokens // self._block) * self._block


def _end_of(position: Any) -> int:
    """The place behind a media item."""
    return int(position.offset + position.length)


def _must_be_whole(request: Any) -> bool:
    # Load-bearing: the CPU build's model runner V1 fails on a chunk of a request with a seed, and
    # the engine with it. Its generators have no offset to set back.
    sampling = request.sampling_params
    return bool(sampling and sampling.seed is not None and current_platform.is_cpu())


def _left_of(request: Any) -> int:
    """Known tokens that are not computed, as if nothing of them were cached."""
    return int(request.num_tokens - request.num_computed_tokens)


def first_prompt(scheduler: Any) -> Any:
    """The waiting request that upstream looks at first; None: none waits.

    A paused session has nothing to compute, and what stands behind it comes first.
    """
    # Load-bearing: requests that hold blocks come before all others.
    for queue in (scheduler.kv_holding_waiting, scheduler.waiting):
        for request in first(queue, _MOST_LOOKED_AT):
            if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
                return request
    return None


def _is_ready(scheduler: Any, request: Any) -> bool:
    """Whether upstream would admit the request if there is room, as far as is known here."""
    has_adapter = scheduler.lora_config and request.lora_request
    is_stale = request.num_stale_output_tokens and not request.drop_stale_output
    is_blocked = scheduler._is_blocked_waiting_status(request.status)
    return not (is_blocked or has_adapter or is_stale)


def _has_room(scheduler: Any, head: Any, prefilling: Sequence[Any]) -> bool:
    """Whether what is next is ready, and seats and blocks are there for all of it."""
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
