"""A bound for replays: KV tiers that know which conversations have ended."""

from collections.abc import Callable
from typing import Any

from meridian_patch.engine.kv_cache.tiers import KVTiers
from meridian_patch.policy.retention import Retention, Tier
from meridian_patch.replay.types import ReplayRequest


def drop_ended(tiers: KVTiers, request_of: Callable[[str], ReplayRequest]) -> None:
    """Let all of a last request but the shared system prompt be evicted first.

    Args:
        tiers: of the scheduler under test; its ``begin_free`` is wrapped.
        request_of: the replayed request of a request id.
    """
    begin_free = tiers.begin_free

    def begin_free_knowing(request: Any) -> None:
        replayed = request_of(request.request_id)
        if replayed.is_last:
            ended = Retention(replayed.shared_tokens, Tier.THINK_COMPLETE)
            tiers._finished[request.request_id] = ended
        begin_free(request)

    tiers.begin_free = begin_free_knowing  # type: ignore[method-assign]
