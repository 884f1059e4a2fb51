"""Reads which arms a served comparison has."""

import re
from collections.abc import Mapping, Sequence
from typing import get_args

from meridian_patch.bench.served.arms import ARM_ENVIRONMENTS, STOCK, STOCK_AGAIN, Arm
from meridian_patch.config.load import load_config
from meridian_patch.config.schema import PolicyConfig
from meridian_patch.envs import OVERRIDE_PREFIX
from meridian_patch.errors import BenchError, ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def policy_profiles() -> tuple[str, ...]:
    """Every value that ``policy.name`` may have."""
    return get_args(PolicyConfig.model_fields["name"].annotation)


def known_arms() -> dict[str, Mapping[str, str]]:
    """Arms by name: stock, patched as the environment configures it, and the policy profiles.

    A second stock server says by how much servers differ that should not.
    """
    name_variable = _variable("policy.name")
    profiles = {name: {"MERIDIAN_PATCH": "1", name_variable: name} for name in policy_profiles()}
    return {**ARM_ENVIRONMENTS, STOCK_AGAIN: ARM_ENVIRONMENTS[STOCK], **profiles}


def read_arms(names: str, described: Sequence[str], base: Mapping[str, str]) -> list[Arm]:
    """Arms in the order given.

    Args:
        names: comma list of ``known_arms``.
        described: arms as ``NAME:section.key=value,section.key=value``.
        base: environment that the servers inherit.

    Raises:
        BenchError: an unknown name, a name used twice, or a wrong key or value.
    """
    known = known_arms()
    arms = []
    for name in filter(None, names.split(",")):
        if name not in known:
            raise BenchError(f"--arms: unknown arm {name!r}; known: {', '.join(known)}")
        arms.append(Arm(name, known[name]))
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


def _described_arm(text: str) -> Arm:
    name, colon, settings = text.partition(":")
    if not _NAME.fullmatch(name) or not colon or not settings:
        raise BenchError(
            f"--arm is {text!r}, expected NAME:section.key=value, such as "
            "patient:policy.max_preemptions=5"
        )
    if name in {STOCK, STOCK_AGAIN}:
        raise BenchError(f"--arm is {text!r}: {name} has no settings of ours; use another name")
    environment = {"MERIDIAN_PATCH": "1"}
    for setting in settings.split(","):
        key, equals, value = setting.partition("=")
        if not key or not equals:
            raise BenchError(f"--arm {name}: {setting!r} is no setting, expected section.key=value")
        environment[_variable(key)] = value
    return Arm(name, environment)


def _check_configuration(arm: Arm, base: Mapping[str, str]) -> None:
    """A wrong value would otherwise show only after the servers have taken their time to start."""
    try:
        load_config({**base, **arm.environment})
    except ConfigError as error:
        raise BenchError(f"arm {arm.name}: {error}") from None


def _variable(key: str) -> str:
    return OVERRIDE_PREFIX + key.upper().replace(".", "__")
