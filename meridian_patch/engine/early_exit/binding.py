"""Builds early exit for a scheduler, as far as the served model and its KV cache support it."""

from typing import Any

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config

from meridian_patch.config.families import exit_config
from meridian_patch.config.schema import Config, ExitConfig
from meridian_patch.engine import status
from meridian_patch.engine.boundaries import vocabulary_of
from meridian_patch.engine.early_exit.answer_room import AnswerRoom
from meridian_patch.engine.early_exit.close_checks import CloseChecks
from meridian_patch.engine.early_exit.engine_lag import lag_of
from meridian_patch.engine.early_exit.forced_close import ForcedCloses
from meridian_patch.engine.early_exit.manager import EarlyExit
from meridian_patch.engine.early_exit.obstacles import against_probes, against_signals
from meridian_patch.engine.early_exit.probes import ProbeLimits, Probes
from meridian_patch.engine.early_exit.signal_health import report_not_probed
from meridian_patch.engine.early_exit.trace import ExitTrace
from meridian_patch.engine.early_exit.wrap_ups import WrapUps
from meridian_patch.exit.actions import NO_OBSTACLES, Obstacles
from meridian_patch.exit.patterns import PatternTokens
from meridian_patch.exit.strategies.build import BY_PROBES, BY_SIGNALS, is_probing
from meridian_patch.exit.text_breaks import Breaks, find_breaks
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.tracker import PhaseTracker
from meridian_patch.phase.wrap_up import settle_wrap_up
from meridian_patch.telemetry.counters import PhaseCounters

logger = init_logger("vllm.meridian_patch")


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
    closings = ForcedCloses(
        boundaries,
        model_config.get_vocab_size(),
        scheduler.num_spec_tokens,
        scheduler.max_model_len,
    )
    checks = CloseChecks(scheduler, closings.sequence)
    default_scope = whole_config.requests.stop_scope
    wrap_ups = WrapUps(vocabulary, boundaries, checks, default_scope, phase_counters)
    closings.choose_wrap_up, closings.left_out = wrap_ups.choose, wrap_ups.left_out
    if checks.has_processors and config.mode == "enforce":
        logger.warning(
            "meridian_patch: no thought is closed: this server has custom logits processors, "
            "which may undo a forced close"
        )
    return EarlyExit(
        config,
        boundaries,
        load_breaks(model_config),
        tracker,
        closings,
        checks,
        AnswerRoom(scheduler, closings.sequence, wrap_ups.ids_of),
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
