"""``meridian serve --role``: an engine that thinks, and which engines answer."""

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

from meridian_patch.config.validate import shown
from meridian_patch.config.yaml_file import parse_value, read_text
from meridian_patch.errors import ConfigError

OF_ROLES: Final = ("--role", "--fabric", "--offload-threshold-blocks", "--answer")
"""Options that ``split_role`` takes."""
_TRANSFER: Final = "--kv-transfer-config"
_PORT: Final = "--port"
# Load-bearing: with it vLLM serves its endpoint for token ids, which answers are asked from.
_SCALE_OUT: Final = "--enable-scale-out"
_CONFIG: Final = "--config"
_DEFAULT_PORT: Final = 8000
# An engine over several hosts has one port on all of them, whatever port its API server has.
_SEVERAL_HOSTS: Final = frozenset(("--headless", "--nnodes", "--data-parallel-address"))
# Ports at which engines find each other begin at the first one; each server has as many as it may
# have data-parallel ranks. All are below 32768, where Linux begins to give ports to clients: one of
# those would keep a server that starts again from its own.
_FIRST_CHANNEL: Final = 10_000
_CHANNELS: Final = 8
_ALL_CHANNELS: Final = 22_000


class Fabric(NamedTuple):
    """A way for KV blocks from one engine to another.

    Attributes:
        connector: vLLM's connector.
        module: the Python package that it needs.
        install: how to install that package.
        port: vLLM's variable for the port at which other engines find this one. Its default is the
            same for all servers of a host.
        settings: other variables of vLLM, unless they are set.
    """

    connector: str
    module: str
    install: str
    port: str
    settings: Mapping[str, str] = MappingProxyType({})


FABRICS: Final[Mapping[str, Fabric]] = {
    "nixl": Fabric("NixlConnector", "nixl", "'pip install nixl'", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
    "mooncake": Fabric(
        "MooncakeConnector",
        "mooncake",
        "'pip install mooncake-transfer-engine-cuda13', or mooncake-transfer-engine for CUDA 12",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT",
        # Load-bearing: seconds for which a think engine keeps blocks that no engine fetched. NIXL's
        # connector extends its time while a request waits at its answer engine, and this one does
        # not. vLLM's default is 480: so long would the blocks for a lost engine be missing.
        {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "120"},
    ),
}


class Role(NamedTuple):
    """What ``--role`` changes.

    Attributes:
        arguments: vLLM's own, with the connector's configuration.
        environment: variables to set for the server.
    """

    arguments: list[str]
    environment: dict[str, str]


class ServeParser(argparse.ArgumentParser):
    """Options of ``meridian serve``; a wrong one is one sentence."""

    def error(self, message: str) -> NoReturn:
        """See ``argparse``."""
        raise ConfigError(f"meridian serve: {message}")


def split_role(arguments: Sequence[str], env: Mapping[str, str]) -> Role:
    """Take our options out of the arguments of ``meridian serve``.

    Args:
        arguments: a model, vLLM's options and ours.
        env: the environment of the server.

    Raises:
        ConfigError: a wrong value, an option without ``--role``, or a missing package.
    """
    parser = ServeParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--role", choices=("think", "answer"))
    parser.add_argument("--fabric", choices=tuple(FABRICS))
    parser.add_argument("--offload-threshold-blocks", type=_blocks)
    parser.add_argument("--answer", action="append")
    ours, rest = parser.parse_known_args(list(arguments))
    _check_role(ours)
    if ours.role is None:
        return Role(rest, {})
    settings = {"MERIDIAN_PATCH_SET_HANDOFF__ROLE": ours.role}
    if ours.offload_threshold_blocks is not None:
        name = "MERIDIAN_PATCH_SET_HANDOFF__OFFLOAD_THRESHOLD_BLOCKS"
        settings[name] = str(ours.offload_threshold_blocks)
    settings |= _answer_urls(ours)
    if ours.role == "answer" and _SCALE_OUT not in rest:
        rest.append(_SCALE_OUT)
    given = [*_in_config_file(rest), *rest]
    if any(_is_transfer(each) for each in given):
        if ours.fabric:
            raise ConfigError(f"meridian serve: give either --fabric or {_TRANSFER}, not both")
        return Role(rest, settings)
    fabric = FABRICS[ours.fabric or "nixl"]
    if importlib.util.find_spec(fabric.module) is None:
        raise ConfigError(
            f"meridian serve --role {ours.role}: the package {fabric.module} is missing, which "
            f"moves the KV cache; {fabric.install}"
        )
    wanted = dict(fabric.settings)
    if not any(_name_of(each) in _SEVERAL_HOSTS for each in given):
        wanted[fabric.port] = str(_side_channel(given))
    settings |= {name: value for name, value in wanted.items() if name not in env}
    return Role([*rest, _TRANSFER, json.dumps(_transfer(fabric))], settings)


def _check_role(ours: argparse.Namespace) -> None:
    for name in ("fabric", "offload_threshold_blocks", "answer"):
        if ours.role is None and getattr(ours, name) is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"meridian serve: --{option} needs --role think or answer")
    if ours.answer and ours.role != "think":
        raise ConfigError("meridian serve: --answer needs --role think")


def _answer_urls(ours: argparse.Namespace) -> dict[str, str]:
    if not ours.answer:
        return {}
    return {"MERIDIAN_PATCH_SET_HANDOFF__ANSWER_URLS": json.dumps(ours.answer)}


def _transfer(fabric: Fabric) -> dict[str, Any]:
    return {
        "kv_connector": fabric.connector,
        "kv_role": "kv_both",
        # A request whose KV cache does not arrive is computed here.
        "kv_load_failure_policy": "recompute",
    }


def _in_config_file(arguments: list[str]) -> list[str]:
    """Options of the file that vLLM's ``--config`` names, as arguments.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    # Load-bearing: vLLM reads the file of this spelling only, before all other arguments.
    if _CONFIG not in arguments[:-1]:
        return []
    path = Path(arguments[arguments.index(_CONFIG) + 1])
    options = parse_value(read_text(path), f"file {path}")
    if not isinstance(options, dict):
        raise ConfigError(
            f"file {path}, which {_CONFIG} names, is a {type(options).__name__}, expected a "
            "mapping of vLLM's options"
        )
    return [f"--{name}={value}" for name, value in options.items()]


def _side_channel(arguments: Sequence[str]) -> int:
    """A port for the connector that differs between servers of one host, as theirs do."""
    parser = ServeParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_PORT, type=int, default=_DEFAULT_PORT)
    port = int(parser.parse_known_args(list(arguments))[0].port)
    return _FIRST_CHANNEL + port * _CHANNELS % _ALL_CHANNELS


def _is_transfer(argument: str) -> bool:
    """Whether an argument configures the connector, in any of vLLM's spellings."""
    return _name_of(argument) == _TRANSFER


def _name_of(argument: str) -> str:
    """The option that an argument sets, as vLLM spells it in its help."""
    return argument.partition("=")[0].partition(".")[0].replace("_", "-")


def _blocks(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"is {shown(text)}, expected 0 or more")
    return number
