"""Lists all strategies, and builds those of one thought from the configuration."""

from collections.abc import Mapping
from typing import Final

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.answer_reserve import AnswerReserve
from meridian_patch.exit.strategies.base import NATURAL, UNANSWERED, Strategy, ThoughtStart
from meridian_patch.exit.strategies.eat import Eat
from meridian_patch.exit.strategies.end_probability import EndProbability
from meridian_patch.exit.strategies.hard_cap import Budget, HardCap
from meridian_patch.exit.strategies.loop import LoopBreaker
from meridian_patch.exit.strategies.pattern import PatternExit
from meridian_patch.exit.strategies.rpdi import Rpdi

LISTED: Final[tuple[type[Strategy], ...]] = (
    Eat,
    Rpdi,
    HardCap,
    Budget,
    EndProbability,
    LoopBreaker,
    PatternExit,
    AnswerReserve,
)
"""All strategies. A new one stands at the end, because metrics keep the order of their labels."""

STRATEGIES: Final = tuple(sorted(LISTED, key=lambda each: each.is_bound))
"""In the order in which they are asked: of those that fire at the same token the first counts."""

REASONS: Final[Mapping[str, str]] = {
    NATURAL: "the model ended its thought itself",
    **{each.reason: each.words for each in LISTED},
    UNANSWERED: "the request ended in its thought, without an answer",
}
"""All reasons for which a thought may end, and what is said of each."""

SWITCHES: Final = tuple(
    each.reason
    for each in STRATEGIES
    if (field := ExitConfig.model_fields.get(each.reason)) and field.annotation is bool
)
"""Strategies that the configuration switches on and off: a switch is named as its reason."""

OWN_BOUNDS: Final = tuple(
    each.reason for each in STRATEGIES if each.is_bound and each is not Budget
)
"""Upper bounds at which the plug-in itself closes thoughts: none may open behind such a close."""

BY_SIGNALS: Final = tuple(each.reason for each in STRATEGIES if each.uses_signals)
"""Strategies that need signals or probes: callers are told where an engine has none."""

BY_PROBES: Final = tuple(each.reason for each in STRATEGIES if each.uses_probes)
"""Strategies that need probes."""


def build_strategies(config: ExitConfig, start: ThoughtStart) -> list[Strategy]:
    """New strategies for a thought; if several fire at the same token, the first is used.

    Args:
        config: the request's configuration.
        start: what is known of the thought.
    """
    return [each.of(config, start) for each in STRATEGIES if each.is_on(config, start)]


def is_probing(config: ExitConfig) -> bool:
    """Whether a strategy that is on needs probes."""
    return any(each.uses_probes and each.is_on(config) for each in STRATEGIES)
