"""Builds the strategies of one thought from the configuration."""

from typing import TYPE_CHECKING, Final, cast

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import Reason, Strategy
from meridian_patch.exit.strategies.eat import Eat
from meridian_patch.exit.strategies.end_probability import EndProbability
from meridian_patch.exit.strategies.hard_cap import HardCap
from meridian_patch.exit.strategies.loop import LoopBreaker
from meridian_patch.exit.strategies.pattern import PatternExit
from meridian_patch.exit.strategies.rpdi import Rpdi
from meridian_patch.exit.text_breaks import Breaks

if TYPE_CHECKING:
    from meridian_patch.exit.patterns import Sequences

SWITCHES: Final = tuple(
    reason.value
    for reason in Reason
    if (field := ExitConfig.model_fields.get(reason.value)) and field.annotation is bool
)
"""Strategies that the configuration switches on and off: a switch is named as its reason."""

# At most 1/8 of max_think_tokens may be given up to find the end of a line.
_MOST_LEAD_SHARE = 8


def build_strategies(
    config: ExitConfig, breaks: Breaks, budget_tokens: int | None = None, think_tokens: int = 0
) -> list[Strategy]:
    """New strategies for a thought; if several fire at the same token, the first is used.

    Args:
        config: the request's configuration.
        breaks: text breaks of the served vocabulary.
        budget_tokens: vLLM's ``thinking_token_budget``; None: it has none.
        think_tokens: number of tokens that the thought has already.
    """
    strategies: list[Strategy] = []
    if config.eat:
        strategies.append(
            Eat(
                config.eat_alpha,
                config.eat_delta,
                config.eat_warmup_probes,
                config.eat_max_entropy_nats,
            )
        )
    if config.rpdi:
        strategies.append(Rpdi(config.rpdi_window_tokens, config.rpdi_lambda, breaks.sentence))
    if config.end_probability:
        strategies.append(
            EndProbability(config.end_probability_threshold, config.end_probability_patience)
        )
    if config.loop:
        strategies.append(
            LoopBreaker(
                config.loop_max_pattern_size, config.loop_min_pattern_size, config.loop_min_count
            )
        )
    if config.patterns:
        # They are tokens since the server started, and since the request was read.
        strategies.append(PatternExit(cast("tuple[Sequences, ...]", config.patterns)))
    if config.max_think_tokens is not None:
        lead = min(config.grace_tokens, config.max_think_tokens // _MOST_LEAD_SHARE)
        strategies.append(HardCap(config.max_think_tokens, lead, think_tokens))
    if budget_tokens is not None:
        # vLLM itself ends the thought there, so there is no time to wait for the end of a line.
        strategies.append(HardCap(budget_tokens, 0, think_tokens, Reason.BUDGET))
    return strategies
