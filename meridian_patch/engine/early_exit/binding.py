"""Builds early exit for a scheduler, as far as the served model and its engine support it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker import worker_base

from meridian_patch.config.family_files import exit_config
from meridian_patch.config.schema import Config, ExitConfig
from meridian_patch.engine import status
from meridian_patch.engine.boundaries import vocabulary_of
from meridian_patch.engine.early_exit.close import ForcedCloses, close_sequence
from meridian_patch.engine.early_exit.close_checks import (
    AnswerRoom,
    CloseChecks,
    WrapUps,
    lag_of,
)
from meridian_patch.engine.early_exit.part import EarlyExit
from meridian_patch.engine.early_exit.probes import ProbeLimits, Probes
from meridian_patch.engine.early_exit.report import ExitTrace
from meridian_patch.engine.early_exit.signals import report_not_probed
from meridian_patch.engine.handoff.layout import NIXL_CONNECTORS
from meridian_patch.engine.kv_cache.shared_blocks import tokens_behind_hits
from meridian_patch.exit.actions import NO_OBSTACLES, Obstacle, Obstacles
from meridian_patch.exit.patterns import PatternTokens
from meridian_patch.exit.strategies.build import BY_PROBES, BY_SIGNALS, is_probing
from meridian_patch.exit.text_breaks import Breaks, find_breaks
from meridian_patch.patching.candidate import MARK
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.tracker import PhaseTracker
from meridian_patch.phase.wrap_up import settle_wrap_up
from meridian_patch.telemetry.counters import PhaseCounters

logger = init_logger("vllm.meridian_patch")

# Load-bearing: they act only on requests that have `kv_transfer_params`, and a probe has none.
_BLIND_CONNECTORS = NIXL_CONNECTORS


def build_early_exit(
    scheduler: Any,
    whole_config: Config,
    boundaries: Boundaries | None,
    tracker: PhaseTracker,
    phase_counters: PhaseCounters,
    patterns: PatternTokens,
) -> EarlyExit | None:
    """Early exit for a scheduler that is being built; None if the model does not think.

    Raises:
        ConfigError: the family's early exit settings contradict the configuration's, or a pattern
            cannot be followed in tokens.
    """
    if boundaries is None:
        return None
    model_config = scheduler.vllm_config.model_config
    vocabulary = vocabulary_of(cached_tokenizer_from_config(model_config), str(model_config.model))
    config = settle_wrap_up(
        exit_config(whole_config, boundaries.family), whole_config, vocabulary, boundaries
    )
    if config.patterns:
        where = f"exit.patterns, of the configuration or of family {boundaries.family},"
        found = patterns.find(config.patterns, where)
        config = config.model_copy(update={"patterns": found})
    _check_lag(scheduler, whole_config, config)
    blind = next(against_signals(scheduler.vllm_config), None)
    unprobed = blind or next(against_probes(scheduler, boundaries), None)
    unable: Obstacles = NO_OBSTACLES
    if blind is not None:
        unable = dict.fromkeys(BY_SIGNALS, blind.obstacle)
    elif unprobed is not None:
        unable = dict.fromkeys(BY_PROBES, unprobed.obstacle)
    if config.mode != "off":
        if blind is not None:
            status.publish(exit_signals=f"none: {blind.why}")
        if unprobed is not None and is_probing(config):
            report_not_probed(unprobed.why)
    sequence = close_sequence(boundaries)
    checks = CloseChecks(scheduler, sequence)
    default_scope = whole_config.requests.stop_scope
    wrap_ups = WrapUps(vocabulary, boundaries, checks, default_scope, phase_counters)
    closes = ForcedCloses(
        boundaries,
        model_config.get_vocab_size(),
        scheduler.num_spec_tokens,
        scheduler.max_model_len,
        checks,
        wrap_ups,
        phase_counters,
    )
    if checks.has_processors and config.mode == "enforce":
        logger.warning(
            "meridian_patch: no thought is closed: this server has custom logits processors, "
            "which may undo a forced close"
        )
    return EarlyExit(
        scheduler,
        config,
        boundaries,
        load_breaks(model_config),
        tracker,
        closes,
        AnswerRoom(scheduler, sequence, wrap_ups.ids_of),
        None if unprobed is not None else _probes(scheduler, boundaries, config),
        phase_counters,
        unable,
        None if config.trace is None else ExitTrace(config.trace),
        is_blind=blind is not None,
    )


def _probes(scheduler: Any, boundaries: Boundaries, config: ExitConfig) -> Probes:
    limits = ProbeLimits(
        config.probes_in_flight, config.probe_every_steps, config.probe_context_tokens
    )
    return Probes(scheduler, boundaries.probe, limits)


def load_breaks(model_config: Any) -> Breaks:
    """Which tokens of the served vocabulary end sentences, lines and paragraphs."""
    tokenizer = cached_tokenizer_from_config(model_config)
    ids = [[token_id] for token_id in range(len(tokenizer))]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return find_breaks((ids[0], text) for ids, text in zip(ids, texts, strict=True))


def _check_lag(scheduler: Any, whole_config: Config, config: ExitConfig) -> None:
    """Warn if the thresholds were calibrated for an engine that closes earlier or later."""
    provenance = whole_config.provenance or {}
    if config.mode == "off" or not provenance.keys() & {"curve", "lag"}:
        return
    here, there = lag_of(scheduler, config.probe_every_steps)._asdict(), provenance.get("lag")
    # The block size is not compared: it moves only few closes, and by one token.
    del here["block_tokens"]
    if not isinstance(there, dict):
        there = {}
    differing = [name for name in here if here[name] != there.get(name)]
    if differing:
        logger.warning(
            "meridian_patch: the thresholds of early exit were calibrated for an engine with %s, "
            "and this one has %s: thoughts are closed at other tokens than those that were graded. "
            "Run meridian calibrate again, with this engine's arguments as --engine NAME=VALUE",
            ", ".join(f"{name} {there.get(name, 'unknown')}" for name in differing),
            ", ".join(f"{name} {here[name]}" for name in differing),
        )


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
