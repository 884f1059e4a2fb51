"""Settings with which one strategy alone is on, and fires on thoughts of a few dozen tokens."""

import json
from typing import Any

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.build import BY_SIGNALS, STRATEGIES, SWITCHES
from meridian_patch.exit.strategies.hard_cap import Budget

# Strategies without a switch are on by a value.
BY_VALUE: dict[str, dict[str, Any]] = {
    "pattern": {"patterns": [[10, 10], [70, 71], [[80, 90], [81, 70]]]},
    "hard_cap": {"max_think_tokens": 60},
    # Of the output of a request that would think for 400 tokens, answer, and have tokens left.
    "answer_reserve": {"answer_reserve": 1400},
}
# vLLM's own budget is none of the configuration's.
NAMES = tuple(each.reason for each in STRATEGIES if each is not Budget)
"""Strategies that the configuration can switch on."""

BY_TOKENS = tuple(switch for switch in SWITCHES if switch not in BY_SIGNALS)
"""Strategies with a switch that look at tokens alone: for them the simulation's thoughts loop."""


def short_thoughts(strategy: str) -> dict[str, Any]:
    """The keys of section ``exit`` for one strategy, by its reason.

    Values of its settings are the first of their examples in the schema.
    """
    fields = ExitConfig.model_fields.items()
    shown = {name: field.examples[0] for name, field in fields if field.examples}
    switches = {switch: switch == strategy for switch in SWITCHES}
    return {**shown, **switches, **BY_VALUE.get(strategy, {})}


def as_variables(settings: dict[str, Any]) -> dict[str, str]:
    """Settings of section ``exit`` as the ends of environment variables, and their texts."""
    return {f"EXIT__{name.upper()}": json.dumps(value) for name, value in settings.items()}
