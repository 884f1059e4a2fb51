"""Builds the part of a scheduler that hands requests off, or takes them over."""

from typing import Any

from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.engine.handoff.answer_part import AnswerPart
from meridian_patch.engine.handoff.layout import check_connector
from meridian_patch.engine.handoff.think_part import ThinkPart
from meridian_patch.errors import ConfigError
from meridian_patch.phase.tracker import PhaseTracker


def build_handoff(
    scheduler: Any, config: HandoffConfig, tracker: PhaseTracker
) -> ThinkPart | AnswerPart | None:
    """The part for an engine's role; None for an engine that thinks and answers.

    Raises:
        ConfigError: the engine cannot have this role.
    """
    if config.role == "none":
        return None
    check_connector(scheduler, config.role)
    if config.role == "answer":
        return AnswerPart(scheduler.vllm_config, scheduler.phase_counters)
    if not tracker.has_boundaries:
        raise ConfigError(
            "handoff.role is 'think', and the model's think boundaries are unknown, expected a "
            "model of a known family; see 'meridian boundaries'"
        )
    return ThinkPart(scheduler, tracker, config.offload_threshold_blocks)
