"""Reads the arms of a served comparison: stock servers, and patched ones by their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meridian_patch.bench.arms import POLICIES, STOCK, load_arm_config, override, parse_arm
from meridian_patch.bench.served.server import ServerSettings, server_environment
from meridian_patch.errors import BenchError

STOCK_AGAIN, AMPLE, NOOP, PATCHED = "stock-again", "ample", "noop", "patched"
# Pools of the arm ample, in pools of the others: nothing is evicted in the default workload.
_AMPLE_FACTOR = 20


@dataclass(frozen=True)
class ServedArm:
    """The settings that one arm's server has for itself.

    Attributes:
        name: in tables and file names; ``stock`` is what the others are compared with.
        environment: variables that decide whether and how we are active.
        pool_factor: size of its KV pool, in pools of the other arms.
    """

    name: str
    environment: Mapping[str, str]
    pool_factor: int = 1

    def settings(self, shared: ServerSettings) -> ServerSettings:
        """Settings of the arm's server; without a given pool, the factor has no effect."""
        if shared.kv_blocks is None or self.pool_factor == 1:
            return shared
        return replace(shared, kv_blocks=self.pool_factor * shared.kv_blocks)


def _known_arms() -> dict[str, ServedArm]:
    # An empty list of plugins: not even our entry point is loaded.
    off, on = {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": ""}, {"MERIDIAN_PATCH": "1"}
    arms = [
        ServedArm(STOCK, off),
        # Our scheduler, deciding as stock does: it counts in which phase a preempted request was.
        ServedArm(NOOP, on | override({"policy.name": NOOP})),
        # As the environment configures it.
        ServedArm(PATCHED, on),
        # By how much servers differ that should not.
        ServedArm(STOCK_AGAIN, off),
        # The upper bound of prefix hits.
        ServedArm(AMPLE, off, _AMPLE_FACTOR),
        *(ServedArm(name, on | override({"policy.name": name})) for name in POLICIES),
    ]
    return {arm.name: arm for arm in arms}


KNOWN_ARMS: Mapping[str, ServedArm] = _known_arms()


def read_arms(names: str, described: Sequence[str], base: Mapping[str, str]) -> list[ServedArm]:
    """Arms in the order given.

    Args:
        names: comma list of ``KNOWN_ARMS``.
        described: arms as ``NAME:KEY=VALUE,...``, with ``config=FILE`` among them.
        base: environment that the servers inherit.

    Raises:
        BenchError: an unknown name, a name used twice, or a wrong key or value.
    """
    arms = []
    for name in filter(None, names.split(",")):
        if name not in KNOWN_ARMS:
            raise BenchError(f"--arms: unknown arm {name!r}; known: {', '.join(KNOWN_ARMS)}")
        arms.append(KNOWN_ARMS[name])
    for text in described:
        name, environment = parse_arm(text, {STOCK, STOCK_AGAIN, AMPLE})
        arms.append(ServedArm(name, {"MERIDIAN_PATCH": "1", **environment}))
    if not arms:
        raise BenchError("--arms is empty, expected at least one arm, such as stock,latency")
    taken = [arm.name for arm in arms]
    for name in taken:
        if taken.count(name) > 1:
            raise BenchError(f"arm {name!r} is named twice; give each arm a name of its own")
    for arm in arms:
        load_arm_config(arm.name, {**base, **arm.environment})
    return arms


def arm_environment(environment: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Complete environment of an arm's server: ``base`` with the arm's own activation."""
    inherited = {name: value for name, value in base.items() if name != "VLLM_PLUGINS"}
    return server_environment(inherited) | dict(environment)
