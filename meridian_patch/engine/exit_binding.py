"""Binds early exit to a scheduler: what the served model and its cache allow of it."""

from typing import Any

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.worker import worker_base

from meridian_patch.config.families import exit_config
from meridian_patch.config.schema import Config, ExitConfig
from meridian_patch.engine.closing import Closings
from meridian_patch.engine.exit_trace import ExitTrace
from meridian_patch.engine.exits import Exits
from meridian_patch.engine.probes import Probes
from meridian_patch.exit.breaks import Breaks, find_breaks
from meridian_patch.patching.candidate import MARK
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.router import PhaseRouter
from meridian_patch.telemetry.counters import PhaseCounters

logger = init_logger("vllm.meridian_patch")


def bind_exits(
    scheduler: Any,
    whole_config: Config,
    boundaries: Boundaries | None,
    router: PhaseRouter,
    phase_counters: PhaseCounters,
) -> Exits | None:
    """Early exit of a scheduler that is being built; None where nothing thinks.

    Raises:
        ConfigError: the family's early exit and the configuration's do not go together.
    """
    if boundaries is None:
        return None
    config = exit_config(whole_config, boundaries.family)
    model_config = scheduler.vllm_config.model_config
    reason = _reason_against_probes(scheduler, boundaries)
    if reason is not None and config.eat and config.mode != "off":
        logger.warning("meridian_patch: EAT is off, thoughts are not probed: %s", reason)
    return Exits(
        config,
        boundaries,
        load_breaks(model_config),
        router,
        Closings(boundaries, model_config.get_vocab_size(), scheduler.num_spec_tokens),
        None if reason else _probes(scheduler, boundaries, config),
        phase_counters,
        None if config.trace is None else ExitTrace(config.trace),
    )


def _probes(scheduler: Any, boundaries: Boundaries, config: ExitConfig) -> Probes:
    return Probes(scheduler, boundaries.probe, config.probes_in_flight, config.probe_every_steps)


def load_breaks(model_config: Any) -> Breaks:
    """Which tokens of the served vocabulary end sentences, lines and paragraphs."""
    tokenizer = cached_tokenizer_from_config(model_config)
    ids = [[token_id] for token_id in range(len(tokenizer))]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return find_breaks((ids[0], text) for ids, text in zip(ids, texts, strict=True))


def _reason_against_probes(scheduler: Any, boundaries: Boundaries) -> str | None:
    if not hasattr(worker_base.WorkerBase, MARK):
        return "the workers are not patched, as with --scheduler-cls alone; nothing is measured"
    if not boundaries.probe:
        return "the probe's text cannot be written in tokens"
    if not scheduler.kv_cache_manager.enable_caching:
        return "prefix caching is off, each probe would compute the whole thought again"
    if len(scheduler.kv_cache_config.kv_cache_groups) != 1:
        return "the model has several groups of KV cache"
    if scheduler.connector is not None:
        return "a KV connector is in use, which would see the probes"
    return None
