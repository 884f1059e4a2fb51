"""Reads the arms of a served comparison: stock servers, and patched ones by their settings."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from meridian_patch.bench.served.server import ServerSettings, server_environment
from meridian_patch.config.load import load_config
from meridian_patch.config.schema import PolicyConfig
from meridian_patch.envs import OVERRIDE_PREFIX
from meridian_patch.errors import BenchError, ConfigError

STOCK, STOCK_AGAIN, AMPLE, NOOP, PATCHED = "stock", "stock-again", "ample", "noop", "patched"
_POLICIES: tuple[str, ...] = get_args(PolicyConfig.model_fields["name"].annotation)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# Pools of the arm ample, in pools of the others: nothing is evicted in the default workload.
_AMPLE_FACTOR = 20


@dataclass(frozen=True)
class Arm:
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


def override(settings: Mapping[str, object]) -> dict[str, str]:
    """Environment variables that set configuration keys, such as ``policy.name``."""
    return {
        OVERRIDE_PREFIX + key.upper().replace(".", "__"): str(value)
        for key, value in settings.items()
    }


def _known_arms() -> dict[str, Arm]:
    # An empty list of plugins: not even our entry point is loaded.
    off, on = {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": ""}, {"MERIDIAN_PATCH": "1"}
    arms = [
        Arm(STOCK, off),
        # Our scheduler, deciding as stock does: it counts in which phase a preempted request was.
        Arm(NOOP, on | override({"policy.name": NOOP})),
        # As the environment configures it.
        Arm(PATCHED, on),
        # By how much servers differ that should not.
        Arm(STOCK_AGAIN, off),
        # The upper bound of prefix hits.
        Arm(AMPLE, off, _AMPLE_FACTOR),
        *(Arm(name, on | override({"policy.name": name})) for name in _POLICIES),
    ]
    return {arm.name: arm for arm in arms}


KNOWN_ARMS: Mapping[str, Arm] = _known_arms()


def read_arms(names: str, described: Sequence[str], base: Mapping[str, str]) -> list[Arm]:
    """Arms in the order given.

    Args:
        names: comma list of ``KNOWN_ARMS``.
        described: arms as ``NAME:section.key=value,section.key=value``.
        base: environment that the servers inherit.

    Raises:
        BenchError: an unknown name, a name used twice, or a wrong key or value.
    """
    arms = []
    for name in filter(None, names.split(",")):
        if name not in KNOWN_ARMS:
            raise BenchError(f"--arms: unknown arm {name!r}; known: {', '.join(KNOWN_ARMS)}")
        arms.append(KNOWN_ARMS[name])
    arms += [_described_arm(text) for text in described]
    if not arms:
        raise BenchError("--arms is empty, expected at least one arm, such as stock,latency")
    taken = [arm.name for arm in arms]
    for name in taken:
        if taken.count(name) > 1:
            raise BenchError(f"arm {name!r} is named twice; give each arm a name of its own")
    for arm in arms:
        _check_configuration(arm, base)
    return arms


def arm_environment(environment: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Complete environment of an arm's server: ``base`` with the arm's own activation."""
    inherited = {name: value for name, value in base.items() if name != "VLLM_PLUGINS"}
    return server_environment(inherited) | dict(environment)


def _described_arm(text: str) -> Arm:
    name, colon, settings = text.partition(":")
    if not _NAME.fullmatch(name) or not colon or not settings:
        raise BenchError(
            f"--arm is {text!r}, expected NAME:section.key=value, such as "
            "patient:policy.max_preemptions=5"
        )
    if name in {STOCK, STOCK_AGAIN, AMPLE}:
        raise BenchError(f"--arm is {text!r}: {name} has no settings of ours; use another name")
    values = {}
    for setting in settings.split(","):
        key, equals, value = setting.partition("=")
        if not key or not equals:
            raise BenchError(f"--arm {name}: {setting!r} is no setting, expected section.key=value")
        values[key] = value
    return Arm(name, {"MERIDIAN_PATCH": "1", **override(values)})


def _check_configuration(arm: Arm, base: Mapping[str, str]) -> None:
    """Refuse a wrong value now; the server would refuse it only after its start."""
    try:
        load_config({**base, **arm.environment})
    except ConfigError as error:
        raise BenchError(f"arm {arm.name}: {error}") from None
