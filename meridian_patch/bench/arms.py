"""What arms of served and simulated comparisons share: names, and their form on a command line."""

import re
from collections.abc import Collection, Mapping
from typing import get_args

from meridian_patch.config.load import load_config
from meridian_patch.config.policy import PolicyName
from meridian_patch.config.schema import Config
from meridian_patch.envs import OVERRIDE_PREFIX
from meridian_patch.errors import BenchError, ConfigError

STOCK = "stock"
POLICIES: tuple[str, ...] = get_args(PolicyName)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def parse_arm(text: str, reserved: Collection[str]) -> tuple[str, dict[str, str]]:
    """Name and environment of an arm written as ``NAME:KEY=VALUE,...``.

    Args:
        text: keys are as in a configuration file, or ``config`` for the path of such a file, whose
            values are used for all keys that are not given.
        reserved: names of arms without settings of ours.

    Raises:
        BenchError: the text has another form, or the name is reserved.
    """
    name, _, rest = text.partition(":")
    settings = [item.partition("=") for item in rest.split(",")]
    if not _NAME.fullmatch(name) or not all(key and equals for key, equals, _ in settings):
        raise BenchError(
            f"--arm is {text!r}, expected NAME:KEY=VALUE,... such as "
            "no-tiers:policy.name=latency,kv.tiers=false"
        )
    if name in reserved:
        raise BenchError(f"--arm is {text!r}: {name} has no settings of ours; use another name")
    values = {key.strip(): value.strip() for key, _, value in settings}
    if len(values) < len(settings):
        raise BenchError(f"--arm is {text!r}, which sets a key twice; expected each key once")
    file = {"MERIDIAN_PATCH_CONFIG": values.pop("config")} if "config" in values else {}
    return name, file | override(values)


def override(settings: Mapping[str, object]) -> dict[str, str]:
    """Environment variables that set configuration keys, such as ``policy.name``."""
    return {
        OVERRIDE_PREFIX + key.upper().replace(".", "__"): str(value)
        for key, value in settings.items()
    }


def load_arm_config(name: str, environment: Mapping[str, str]) -> Config:
    """The configuration of an arm.

    Raises:
        BenchError: a key or value is wrong; otherwise it would be refused late, in the engine.
    """
    try:
        return load_config(environment).config
    except ConfigError as error:
        raise BenchError(f"arm {name!r}: {error}") from None
