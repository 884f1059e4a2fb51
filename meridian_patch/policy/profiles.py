"""Defines the rules of each policy; each rule can be switched off alone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Final

from meridian_patch.config.schema import PolicyConfig


@dataclass(frozen=True)
class Rules:
    """The rules in force; a rule that is not named is off.

    Attributes:
        order: answers are served first and preempted last.
        victims: among thinkers, the one that loses the least work is preempted first.
        step_cut: while any request answers, the token budget limits how long prefill makes a step.
        pacing: prefill may use the slack of answers ahead of their ITL target.
        admission: a request is admitted if the forecast KV demand leaves room for it.
        time_sharing: a long thinker may be preempted to admit a new request.
        balance: prefill leaves room for answers on other ranks that compute each step too.
    """

    order: bool = False
    victims: bool = False
    step_cut: bool = False
    pacing: bool = False
    admission: bool = False
    time_sharing: bool = False
    balance: bool = False

    @cached_property
    def are_all_off(self) -> bool:
        """Whether no rule is on, so that every decision is stock's. Asked in every step."""
        return not any(asdict(self).values())


PROFILES: Final[Mapping[str, Rules]] = {
    "latency": Rules(order=True, step_cut=True, time_sharing=True),
    "throughput": Rules(order=True, victims=True, step_cut=True, pacing=True, admission=True),
    "fair": Rules(order=True, step_cut=True, admission=True),
    "noop": Rules(),
}


def choose_rules(config: PolicyConfig) -> Rules:
    """The rules of the configured policy, with the rules that the configuration overrides."""
    profile = asdict(PROFILES[config.name])
    chosen = {name: getattr(config, name) for name in profile}
    return Rules(**{name: profile[name] if on is None else on for name, on in chosen.items()})
