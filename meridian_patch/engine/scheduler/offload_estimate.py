"""Estimates which tokens of a preempted request vLLM's KV connector would load again."""

from dataclasses import fields
from typing import Any, Final

from vllm.logger import init_logger

from meridian_patch.engine import status
from meridian_patch.engine.scheduler import simple_offload_estimate
from meridian_patch.engine.scheduler.reloads import KeptTokens, Reloads

logger = init_logger("vllm.meridian_patch")

# Load-bearing: what these connectors answer in `get_num_new_matched_tokens`.
_UNKNOWN: Final = {
    "LMCacheMPConnector": "it loads nothing for a preempted request",
    "LMCacheConnectorV1": "it looks prompts up alone, and cannot be asked without a side effect",
    "MultiConnector": "which of its connectors would load is not known",
}

# The chunk that is being filled, and one whose last token is not back yet.
_CHUNKS_UNDER_WAY = 2


class OffloadEstimate:
    """Counts the tokens that a request would load again instead of computing, O(1) per request.

    Calls nothing upstream that has a side effect. A store in progress counts as done: vLLM waits
    for it before it overwrites the blocks of a preempted request, and before the request resumes.

    The count is approximate, and only affects which request is preempted:

    1. Whether chunks were evicted is checked for two of them, the request's first and the first
       after its prompt. The tier evicts these before later ones.
    2. With ``has_thinking``, up to two chunks that are not stored yet count as stored, so that
       requests whose chunks are all stored rank equally.
    3. Limits that a request sets on its own loads are ignored.
    4. Blocks that stay in the KV cache after a preemption are not counted.

    Args:
        side: the connector's scheduler side, for which ``reason_against`` returned "".

    Attributes:
        has_thinking: generated tokens are offloaded too, not only prompts.
    """

    def __init__(self, side: Any) -> None:
        self._side = side
        # Load-bearing: there is one cache group, and it holds every token.
        self._chunk_tokens: int = side.config.kv_group_configs[0].tokens_per_chunk
        self.has_thinking = not side.config.offload_prompt_only
        self._under_way = _CHUNKS_UNDER_WAY * self._chunk_tokens if self.has_thinking else 0

    def __call__(self, request: Any) -> int:
        """Number of the request's computed tokens that would be loaded after a preemption."""
        status = self._side._req_status.get(request.request_id)
        # Load-bearing: such a request computes its whole prompt whenever it is admitted.
        if status is None or request.skip_reading_prefix_cache:
            return 0
        group = status.group_states[0]
        # Load-bearing: earlier chunks were passed to a store job, or found in the tier.
        chunks: int = group.next_stored_chunk_idx
        if not chunks or self._is_evicted(status, group.offload_keys[0]):
            return 0
        own = request.num_prompt_tokens // self._chunk_tokens
        if own < chunks and self._is_evicted(status, group.offload_keys[own]):
            chunks = own
        computed: int = request.num_computed_tokens
        return min(chunks * self._chunk_tokens + self._under_way, computed)

    def _is_evicted(self, status: Any, key: bytes) -> bool:
        # Load-bearing: the CPU manager's lookup has no side effect. Other managers' lookups fetch.
        result = self._side.manager.lookup(key, status.req_context)
        return bool(result.name == "MISS")


def build_reloads(scheduler: Any, *, is_on: bool, is_reasoning: bool) -> Reloads | None:
    """What a preemption would not lose; None: it loses all computed tokens.

    Supports vLLM's OffloadingConnector with its CPU manager, and SimpleCPUOffloadConnector, with
    one cache group of full attention. Another connector, or another form of these, is logged once
    and published with its reason.

    Args:
        scheduler: vLLM's scheduler, after its ``__init__``.
        is_on: the configuration allows it.
        is_reasoning: the served model thinks.
    """
    connector = scheduler.connector
    status.publish(reload=None, reload_off=None)
    if connector is None:
        return None
    name = type(connector).__name__
    if not is_on:
        status.publish(reload_off="policy.reload is false")
        return None
    try:
        kept, reason = _estimate(connector, len(scheduler.kv_cache_config.kv_cache_groups))
        reloads = Reloads(connector, kept) if kept is not None else None
    except Exception as error:
        reason, reloads = f"this vLLM's is not as expected: {error!r}", None
    if reloads is None:
        status.publish(reload_off=f"{name}: {reason}")
        logger.info(
            "meridian_patch: a preempted request counts as computing everything again, because of "
            "its KV connector %s: %s",
            name,
            reason,
        )
        return None
    status.publish(reload=f"{name}, {'all tokens' if reloads.has_thinking else 'prompts'}")
    if is_reasoning and not reloads.has_thinking:
        logger.info(
            "meridian_patch: only prompts are offloaded, so thinking is computed again after a "
            "preemption. To offload it too, set offload_prompt_only in --kv-transfer-config: "
            '\'{"kv_connector_extra_config": {"offload_prompt_only": false}}\''
        )
    return reloads


def _estimate(connector: Any, num_cache_groups: int) -> tuple[KeptTokens | None, str]:
    """What a connector keeps of requests, or None and why that is not known."""
    # Compared by name, so that its module is imported only where it is used.
    name = type(connector).__name__
    if name == "OffloadingConnector":
        side = connector.connector_scheduler
        reason = reason_against(side, num_cache_groups)
        return (None, reason) if reason else (OffloadEstimate(side), "")
    if name == "SimpleCPUOffloadConnector":
        manager = connector.scheduler_manager
        reason = simple_offload_estimate.reason_against(manager, num_cache_groups)
        if reason:
            return None, reason
        return simple_offload_estimate.SimpleOffloadEstimate(manager), ""
    return None, _UNKNOWN.get(name, "it is not known to load what a preempted request had computed")


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
    # The attributes that are read at run time; raises AttributeError if one is missing.
    _ = side._req_status.get, side.manager.lookup
    return ""
