"""From configuration to policy."""

from meridian_patch.config.schema import PolicyConfig
from meridian_patch.policy.base import OrderPolicy
from meridian_patch.policy.latency import LatencyPolicy
from meridian_patch.policy.noop import NoopPolicy


def build_policy(config: PolicyConfig) -> OrderPolicy:
    """The policy that ``config.name`` names."""
    if config.name == "noop":
        return NoopPolicy()
    return LatencyPolicy(config.protected_answer_tokens, config.max_preemptions)
