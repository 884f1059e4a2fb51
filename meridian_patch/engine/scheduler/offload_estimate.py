"""What a preemption of a running request would not lose, by vLLM's own offloading connector."""

from dataclasses import fields
from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.meridian_patch")

# The chunk that is being filled, and one whose last token is not back yet.
_CHUNKS_UNDER_WAY = 2


class OffloadEstimate:
    """Tokens that a request would load again instead of computing them, O(1) per request.

    Nothing upstream is called that changes anything. A store that is under way counts: vLLM waits
    for it before the blocks of a preempted request are written over, and before the request
    resumes.

    Approximate, and what is decided by it stays correct: of what the tier has evicted only two
    chunks are looked for, the request's first and its first behind the prompt, which go before
    the later ones. With ``has_thinking`` up to two chunks that are not offloaded yet count as
    offloaded, so that those who have everything there are equal. Bounds that a request sets on
    its own loads are not looked at. Blocks that stay because other requests hold them, or
    because nobody needs the room, are not counted.

    Args:
        side: the connector's scheduler side, which ``reason_against`` found readable.

    Attributes:
        has_thinking: generated tokens are offloaded too, not only prompts.
    """

    def __init__(self, side: Any) -> None:
        self._side = side
        # Load-bearing: with one cache group, every token is in it.
        self._chunk_tokens: int = side.config.kv_group_configs[0].tokens_per_chunk
        self.has_thinking = not side.config.offload_prompt_only
        self._under_way = _CHUNKS_UNDER_WAY * self._chunk_tokens if self.has_thinking else 0

    def __call__(self, request: Any) -> int:
        """Of the request's computed tokens, those that would be loaded."""
        status = self._side._req_status.get(request.request_id)
        # Load-bearing: such a request computes its whole prompt whenever it is admitted.
        if status is None or request.skip_reading_prefix_cache:
            return 0
        group = status.group_states[0]
        # Load-bearing: chunks before this one were handed to a store job, or found in the tier.
        chunks: int = group.next_stored_chunk_idx
        if not chunks or self._is_gone(status, group.offload_keys[0]):
            return 0
        own = request.num_prompt_tokens // self._chunk_tokens
        if own < chunks and self._is_gone(status, group.offload_keys[own]):
            chunks = own
        computed: int = request.num_computed_tokens
        return min(chunks * self._chunk_tokens + self._under_way, computed)

    def _is_gone(self, status: Any, key: bytes) -> bool:
        # Load-bearing: the CPU manager's lookup only looks. Those of other managers fetch.
        result = self._side.manager.lookup(key, status.req_context)
        return bool(result.name == "MISS")


def build_offload_estimate(scheduler: Any, *, is_reasoning: bool) -> OffloadEstimate | None:
    """What tells a preemption's loss on this scheduler; None: all that was computed.

    Only vLLM's OffloadingConnector by itself is known, with its CPU manager and one cache group
    of full attention. What else there may be is logged once.

    Args:
        scheduler: vLLM's, whose ``__init__`` has run.
        is_reasoning: the served model thinks.
    """
    connector = scheduler.connector
    # By name: its module is imported where it is used, and only there.
    if type(connector).__name__ != "OffloadingConnector":
        return None
    try:
        side = connector.connector_scheduler
        reason = reason_against(side, len(scheduler.kv_cache_config.kv_cache_groups))
        found = None if reason else OffloadEstimate(side)
    except Exception as error:
        reason, found = f"this vLLM's is not as expected: {error!r}", None
    if found is None:
        logger.warning(
            "meridian_patch: the offload tier is not taken into account when a request is chosen "
            "for preemption: %s",
            reason,
        )
    elif is_reasoning and not found.has_thinking:
        logger.info(
            "meridian_patch: only prompts are offloaded, so thinking is computed again after a "
            "preemption. To offload it too, set offload_prompt_only in --kv-transfer-config: "
            '\'{"kv_connector_extra_config": {"offload_prompt_only": false}}\''
        )
    return found


def reason_against(side: Any, num_cache_groups: int) -> str:
    """Why a connector's scheduler side cannot be read; empty when it can."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as upstream

    groups = side.config.kv_group_configs
    if num_cache_groups != 1 or len(groups) != 1:
        return "the model has several groups of KV cache"
    if groups[0].sliding_window_size_in_chunks is not None:
        return "the model's attention is not full attention"
    manager = type(side.manager).__name__
    if manager != "CPUOffloadingManager":
        return f"its manager is {manager}, which cannot be asked without a side effect"
    needed = {
        upstream.RequestOffloadState: {"group_states", "req_context"},
        upstream.RequestGroupState: {"next_stored_chunk_idx", "offload_keys"},
    }
    for state, names in needed.items():
        missing = names - {field.name for field in fields(state)}
        if missing:
            return f"this vLLM's {state.__name__} has no {', '.join(sorted(missing))}"
    # What is read of it at run time; raises where it is not there.
    _ = side._req_status.get, side.manager.lookup
    return ""
