"""Chooses the rules in force: those of the policy, and those that the configuration sets."""

from meridian_patch.config.policy import RULES, PolicyConfig, PolicyRules


def choose_rules(config: PolicyConfig) -> PolicyRules:
    """The rules of the configured policy, each switch True or False."""
    switches = {name: getattr(config, name) for name in RULES}
    chosen = {
        name: config.name in RULES[name].on_in if is_on is None else is_on
        for name, is_on in switches.items()
    }
    return PolicyRules(name=config.name, **chosen)
