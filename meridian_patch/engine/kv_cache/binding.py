"""Ties the scheduler's phases to its KV cache manager, or says once why not."""

from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger

from meridian_patch.config.family import History
from meridian_patch.config.schema import Config
from meridian_patch.engine.kv_cache.manager import PhaseKVCaching
from meridian_patch.engine.kv_cache.tiers import KVTiers
from meridian_patch.engine.scheduler.guard import StepGuard
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.tracker import PhaseTracker
from meridian_patch.policy.retention import choose_history
from meridian_patch.telemetry.counters import PhaseCounters

logger = init_logger("vllm.meridian_patch")


def build_kv_tiers(
    manager: Any,
    config: Config,
    boundaries: Boundaries | None,
    tracker: PhaseTracker,
    guard: StepGuard,
    phase_counters: PhaseCounters,
    requests: Mapping[str, Any],
) -> KVTiers | None:
    """The scheduler's side of the KV tiers; None when the cache has none."""
    if not isinstance(manager, PhaseKVCaching):
        logger.warning(
            "meridian_patch: KV tiers are inactive: the KV cache manager is vLLM's own, as always "
            "with --scheduler-cls. Activate meridian_patch before the engine is built to have them"
        )
        return None
    if not manager.queues:
        logger.warning(
            "meridian_patch: KV tiers are inactive: prefix caching is off, so nothing in a free "
            "block can be hit. Leave out --no-enable-prefix-caching to have them"
        )
        return None
    return KVTiers(
        manager,
        tracker,
        _history_rule(config, boundaries),
        boundaries.tool_call if boundaries else (),
        guard,
        phase_counters,
        config.kv.check_interval_s,
        requests,
    )


def _history_rule(config: Config, boundaries: Boundaries | None) -> History:
    if not boundaries or not config.kv.tiers or config.policy.name == "noop":
        return "keep"
    rule = choose_history(
        boundaries.history, config.kv.history, sees_tool_calls=bool(boundaries.tool_call)
    )
    if rule == "unverified":
        logger.warning(
            "meridian_patch: KV tiers keep outputs as stock does: it is not known what the chat "
            "template of family %s does with earlier turns' thinking. Set kv.history to strip, "
            "keep_in_tool_loop or keep, or history in a family file",
            boundaries.family,
        )
    elif rule == "keep" and "keep" not in {boundaries.history, config.kv.history}:
        logger.warning(
            "meridian_patch: KV tiers keep outputs as stock does: the history rule is "
            "keep_in_tool_loop, but family %s has no tool_call marker to see a tool loop by. Set "
            "tool_call in a family file, or kv.history to strip if there are no tools",
            boundaries.family,
        )
    return rule
