"""A bound for replays: KV tiers that know which conversations have ended."""

from collections.abc import Callable
from typing import Any

from meridian_patch.engine.kv_cache.tiers import KVTiers
from meridian_patch.policy.retention import Retention, Tier
from meridian_patch.replay.types import ReplayRequest


def drop_ended(phases: KVTiers, request_of: Callable[[str], ReplayRequest]) -> None:
    """Let all of a last request but the shared system prompt be evicted first.

    Args:
        phases: of the scheduler under test; its ``finished`` is wrapped.
        request_of: the replayed request of a request id.
    """
    finished = phases.finished

    def finished_knowing(request: Any) -> None:
        finished(request)
        replayed = request_of(request.request_id)
        if replayed.is_last:
            ended = Retention(replayed.shared_tokens, Tier.THINK_COMPLETE)
            phases._finished[request.request_id] = ended

    phases.finished = finished_knowing  # type: ignore[method-assign]
