"""Which rules a policy consists of; each can be switched off alone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from meridian_patch.config.schema import PolicyConfig


@dataclass(frozen=True)
class Rules:
    """The rules in force.

    Attributes:
        order: answers are served first and preempted last.
        victims: among thinkers the one that loses the least work is preempted first.
        step_cut: while somebody reads an answer, prefill may make a step only so much longer.
        pacing: what answers are ahead of their pace is time that prefill may use.
        admission: a request is admitted when what runs is forecast to leave room for it.
        time_sharing: a newcomer may take the place of a request that has thought for long.
    """

    order: bool
    victims: bool
    step_cut: bool
    pacing: bool
    admission: bool
    time_sharing: bool

    @property
    def are_all_off(self) -> bool:
        """Every decision is stock's."""
        return not any(asdict(self).values())


PROFILES: Final[Mapping[str, Rules]] = {
    "latency": Rules(
        order=True,
        victims=False,
        step_cut=True,
        pacing=False,
        admission=False,
        time_sharing=True,
    ),
    "throughput": Rules(
        order=True,
        victims=True,
        step_cut=True,
        pacing=True,
        admission=True,
        time_sharing=False,
    ),
    "fair": Rules(
        order=True,
        victims=False,
        step_cut=True,
        pacing=False,
        admission=True,
        time_sharing=False,
    ),
    "noop": Rules(
        order=False,
        victims=False,
        step_cut=False,
        pacing=False,
        admission=False,
        time_sharing=False,
    ),
}


def choose_rules(config: PolicyConfig) -> Rules:
    """The profile's rules, with those that the configuration sets by themselves."""
    profile = asdict(PROFILES[config.name])
    chosen = {name: getattr(config, name) for name in profile}
    return Rules(**{name: profile[name] if on is None else on for name, on in chosen.items()})
