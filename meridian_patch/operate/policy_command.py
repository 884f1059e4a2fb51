"""``meridian policy``: shows and switches what is in force in a running server."""

import argparse
from http import HTTPStatus
from typing import Any, Final, get_args

from meridian_patch.config.policy import PolicyName
from meridian_patch.config.schema import ExitMode
from meridian_patch.errors import MeridianError
from meridian_patch.operate.http_client import Reply, ServerClient, read_object
from meridian_patch.operate.options import add_api_key, api_key

_PATH: Final = "/v1/meridian/policy"
_DEFAULT_URL: Final = "http://localhost:8000"
_LIMIT_S: Final = 30.0


def add_policy(commands: Any) -> None:
    """Add ``policy`` to the subcommands of the ``meridian`` command."""
    policy = commands.add_parser("policy", help="show or switch a running server's policy")
    actions = policy.add_subparsers(required=True, metavar="ACTION")
    shown = actions.add_parser("show", help="what is in force")
    switched = actions.add_parser("set", help="switch it, between two steps, without a restart")
    switched.add_argument(
        "policy",
        nargs="?",
        choices=get_args(PolicyName),
        help="noop decides as stock vLLM; the policy that the server was started with turns back",
    )
    switched.add_argument("--exit", choices=get_args(ExitMode), help="mode of early exit")
    for each in (shown, switched):
        each.add_argument("--url", default=_DEFAULT_URL, help=f"default {_DEFAULT_URL}")
        add_api_key(each)
    shown.set_defaults(run=_show)
    switched.set_defaults(run=_set)


def _show(parsed: argparse.Namespace) -> int:
    server = _server(parsed)
    return _print(server.url, server.get(_PATH))


def _set(parsed: argparse.Namespace) -> int:
    if parsed.policy is None and parsed.exit is None:
        raise MeridianError("meridian policy set: expected a policy, or --exit and a mode")
    server, wanted = _server(parsed), {"policy": parsed.policy, "exit": parsed.exit}
    body = {name: value for name, value in wanted.items() if value is not None}
    return _print(server.url, server.post(_PATH, body))


def _server(parsed: argparse.Namespace) -> ServerClient:
    return ServerClient(parsed.url, api_key(parsed, parsed.url), _LIMIT_S)


def _print(url: str, reply: Reply) -> int:
    """Print what is in force in each engine; returns 1 if any refused what was asked for.

    Raises:
        MeridianError: the server does not answer as it should.
    """
    found = read_object(reply.text)
    if reply.status == HTTPStatus.NOT_FOUND:
        raise MeridianError(
            f"{url} has no live switch, expected a server that was started with "
            "VLLM_PLUGINS=meridian_patch,meridian_switch"
        )
    if reply.status == HTTPStatus.UNAUTHORIZED:
        raise MeridianError(f"{url} asks for its API key: name its file with --api-key-file")
    engines = found.get("engines")
    if not reply.is_ok or not isinstance(engines, list):
        # vLLM's form of an error.
        error = found.get("error")
        why = error.get("message") if isinstance(error, dict) else None
        raise MeridianError(f"{url}: {why or reply.begin}")
    for engine in engines:
        name = f"engine {engine['rank']}  "
        now, started = f"{engine['policy']}, {engine['exit']}", engine["started_as"]
        since = "" if now == started else f"  (started as {started})"
        print(f"{name}policy {engine['policy']}  early exit {engine['exit']}{since}")
        if "refused" in engine:
            print(f"{name}refused: {engine['refused']}")
    return 1 if any("refused" in engine for engine in engines) else 0
