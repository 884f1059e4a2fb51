"""The section ``policy`` of the configuration: policies, their rules, and the rules' settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, Literal

from pydantic import Field

from meridian_patch.config.strict_model import StrictModel

PolicyName = Literal["latency", "noop"]


@dataclass(frozen=True)
class Rule:
    """What belongs to a rule beside its switch in ``PolicyRules`` and the switch's description.

    Attributes:
        on_in: policies that have it on, where the configuration does not set the switch.
        without: what happens without it, for docs/scheduling.md; stock's way, where that is empty.
    """

    on_in: tuple[PolicyName, ...] = ()
    without: str = ""


class PolicyRules(StrictModel):
    """A policy and its rules. This is the only place that names a rule and the policies with it.

    In the configuration a switch may be None: as in the policy. ``choose_rules`` leaves none.
    """

    name: PolicyName = Field(
        default="latency",
        description="`latency` serves answers before thinking, and short thoughts before long "
        "ones; `noop` decides as stock vLLM. Each is a set of rules; a rule that is unset below is "
        "as in the policy.",
    )
    order: Annotated[
        bool | None,
        Rule(
            on_in=("latency",),
            without="stock's order; the last admitted is preempted",
        ),
    ] = Field(
        default=None,
        description="Rule: answers are served first and preempted last. Requests run in this "
        "order: hand-off (the first `protected_answer_tokens` of an answer), answers, thinkers by "
        "level, prefill; preemption takes the last one.",
    )
    step_cut: Annotated[
        bool | None,
        Rule(on_in=("latency",), without="the engine's token budget"),
    ] = Field(
        default=None,
        description="Rule: while any request answers, a step has only as many prefill tokens as "
        "keep it within the tightest target: the request's `meridian_itl_ms`, `answer_itl_ms`, or "
        "1.05 to `step_cut_factor` times the step without prefill, or 40 ms where hardly any "
        "prefill fits in that.",
    )
    time_sharing: Annotated[bool | None, Rule(on_in=("latency",), without="it waits")] = Field(
        default=None,
        description="Rule: requests wait by [level](scheduling.md#time-sharing), new ones first. "
        "The first one that finds no seat or no KV blocks takes those of thinkers of higher "
        "levels, which are preempted.",
    )
    balance: Annotated[bool | None, Rule(without="each rank for itself")] = Field(
        default=None,
        description="Rule: under data parallelism, prefill leaves room for the answers of all "
        "[ranks](scheduling.md#data-parallel-ranks) that compute each step together (mixture "
        "of experts).",
    )

    @cached_property
    def are_all_off(self) -> bool:
        """Whether no rule is on, so that every decision is stock's. Asked in every step."""
        return not self.names_on

    @property
    def names_on(self) -> list[str]:
        """Rules whose switch is on, in the order above."""
        return [name for name in RULES if getattr(self, name)]

    def without(self, rule: str) -> "PolicyRules":
        """The same with one rule off."""
        values = {name: getattr(self, name) for name in PolicyRules.model_fields}
        return PolicyRules(**values | {rule: False})


RULES: Final[Mapping[str, Rule]] = {
    name: each
    for name, field in PolicyRules.model_fields.items()
    for each in field.metadata
    if isinstance(each, Rule)
}
"""All rules by the name of their switch."""


class PolicyConfig(PolicyRules):
    """How requests are ordered, admitted and preempted, and how much prefill a step takes."""

    protected_answer_tokens: int = Field(
        default=16,
        ge=0,
        description="Number of answer tokens after the boundary during which a request goes before "
        "all others, so that its first words do not stall.",
    )
    answer_itl_ms: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Target of the inter-token latency of answers, in milliseconds. Unset: "
        "`step_cut_factor` times the duration of a step without prefill, or 40 ms where fewer than "
        "`min_prefill_tokens` end within that. A request sets its own with "
        "`vllm_xargs: {meridian_itl_ms: ...}`.",
    )
    step_cut_factor: float = Field(
        default=1.2,
        gt=1,
        allow_inf_nan=False,
        description="Upper bound of a step's duration while any request answers, as a multiple of "
        "its duration without prefill; used if no inter-token latency is set, and where at least "
        "`min_prefill_tokens` end within it.",
    )
    think_batch_multiplier: float = Field(
        default=2.5,
        ge=1,
        allow_inf_nan=False,
        description="Divisor of the engine's token budget per step while any request answers, "
        "until enough steps were measured to predict their duration.",
    )
    min_prefill_tokens: int = Field(
        default=64,
        ge=1,
        description="Prefill tokens that a step may always have, regardless of latency targets.",
    )
    drain_s: float = Field(
        default=5.0,
        gt=0,
        allow_inf_nan=False,
        description="Saturation guard: if the lowered token budget was used up in every step for "
        "this many seconds, steps may take twice as long with each further such period, until "
        "prefill has half of a step.",
    )
    level_tokens: int = Field(
        default=1024,
        ge=1,
        le=2**31,
        description="Think tokens with which the first level ends; each further level ends with "
        "twice as many. A lower level is admitted before a higher one, and may displace it. Levels "
        "count only where longer thoughts are further from their ends.",
    )
    prompt_weight: float = Field(
        default=0.25,
        ge=0,
        le=10,
        description="Think tokens that a prompt token counts as while its request waits. 0: all "
        "new requests have the first level.",
    )
    aging_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds of waiting after which a preempted request goes before all others, "
        "and thinkers of any level are preempted for it; only with `time_sharing`.",
    )
    time_budget_us: int = Field(
        default=3000,
        ge=50,
        description="Time for one scheduling decision, in microseconds. One that takes longer is "
        "counted; limits that came late still apply, and an order that is not complete does not.",
    )
