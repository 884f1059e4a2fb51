"""Finds what prevents signals or probes in an engine, before its first step."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker import worker_base

from meridian_patch.engine.handoff.layout import NIXL_CONNECTORS
from meridian_patch.engine.kv_cache.shared_blocks import tokens_behind_hits
from meridian_patch.exit.actions import Obstacle
from meridian_patch.patching.candidate import MARK
from meridian_patch.phase.boundaries import Boundaries

# Load-bearing: they act only on requests that have `kv_transfer_params`, and a probe has none.
_BLIND_CONNECTORS = NIXL_CONNECTORS


class Finding(NamedTuple):
    """One obstacle, and its explanation for the log and the status report."""

    obstacle: Obstacle
    why: str


def against_signals(config: Any) -> Iterator[Finding]:
    """Yield each reason why an engine with this ``VllmConfig`` cannot measure signals.

    Reasons: workers that are not patched, sampling that ranks share, adaptive drafts.
    """
    if not hasattr(worker_base.WorkerBase, MARK):
        yield Finding(
            Obstacle.NO_SIGNALS,
            "the workers are not patched, as with --scheduler-cls alone; nothing is measured",
        )
    # Load-bearing: each rank then samples a part of the batch, but only one sends its output.
    if getattr(config.parallel_config, "enable_batch_sharded_sampling", False):
        yield Finding(
            Obstacle.NO_SIGNALS,
            "the ranks share the sampling (enable_batch_sharded_sampling); nothing is measured",
        )
    # Load-bearing: rows are then dropped on the device, and the host does not know which.
    if getattr(config.speculative_config, "enable_adaptive_verification", False):
        yield Finding(
            Obstacle.NO_SIGNALS,
            "drafts are verified adaptively (enable_adaptive_verification); nothing is measured",
        )


def against_probes(scheduler: Any, boundaries: Boundaries) -> Iterator[Finding]:
    """Reasons why thoughts cannot be probed; they may still be measured."""
    if not boundaries.probe:
        yield Finding(Obstacle.PROBE_TEXT, "the probe's text cannot be written in tokens")
        return
    if not scheduler.kv_cache_manager.enable_caching:
        yield Finding(
            Obstacle.NO_PREFIX_CACHE,
            "prefix caching is off, each probe would compute the whole thought again",
        )
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        yield Finding(Obstacle.KV_GROUPS, "the model has several groups of KV cache")
    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups):
        yield Finding(
            Obstacle.KV_GROUPS, "the model keeps a state in place of its tokens' KV cache"
        )
    connector = scheduler.connector
    if connector is not None and type(connector).__name__ not in _BLIND_CONNECTORS:
        yield Finding(
            Obstacle.KV_CONNECTOR,
            f"the KV connector {type(connector).__name__} would see the probes",
        )
    most_tokens = scheduler.block_size + tokens_behind_hits(scheduler) + len(boundaries.probe)
    if most_tokens > scheduler.max_num_scheduled_tokens:
        yield Finding(
            Obstacle.STEP_TOKENS,
            f"a probe takes up to {most_tokens} tokens, and a step has "
            f"{scheduler.max_num_scheduled_tokens} (max_num_batched_tokens)",
        )
