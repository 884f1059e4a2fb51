"""``meridian route``: starts the router."""

import argparse
import logging
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from meridian_patch.config.json_text import parse_json
from meridian_patch.errors import ConfigError
from meridian_patch.router.engine import Engine, Role
from meridian_patch.router.hung import HUNG_AFTER_S


def add_route(commands: Any) -> None:
    """Add ``route`` to the command line."""
    parser = commands.add_parser(
        "route", help="one address for engines that think and engines that answer"
    )
    parser.add_argument(
        "--think", action="append", required=True, metavar="URL", help="of a think engine"
    )
    parser.add_argument(
        "--answer",
        action="append",
        default=[],
        metavar="URL",
        help="of an answer engine; without any, requests answer where they thought",
    )
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="to listen on (%(default)s)")
    parser.add_argument(
        "--answer-wait-s",
        type=_seconds,
        default=5.0,
        help="after which an answer engine that sent nothing is given up (%(default)s)",
    )
    parser.add_argument(
        "--hung-after-s",
        type=_seconds_or_never,
        default=HUNG_AFTER_S,
        help="without a byte or a step, after which an engine that owes requests a token is out "
        "(%(default)s; 0: never); must be longer than the longest step",
    )
    parser.add_argument(
        "--allowed-origins",
        type=_origins,
        default=["*"],
        metavar="JSON",
        help='pages whose browsers may send requests, as vLLM\'s option (["*"])',
    )
    parser.set_defaults(run=_route)


def engines_of(think: list[str], answer: list[str]) -> list[Engine]:
    """The engines of the command line.

    Raises:
        ConfigError: an address is wrong, or given twice.
    """
    addresses: list[tuple[Role, str]] = [("think", url) for url in think]
    addresses += [("answer", url) for url in answer]
    seen: set[str] = set()
    engines = []
    for role, address in addresses:
        url = address.rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path:
            raise ConfigError(
                f"meridian route --{role} is {address!r}, expected the address of a server, "
                "such as http://127.0.0.1:8000"
            )
        if url in seen:
            raise ConfigError(f"meridian route: {address} is given twice, expected once")
        seen.add(url)
        engines.append(Engine(url, role))
    return engines


def _route(arguments: argparse.Namespace) -> int:
    engines = engines_of(arguments.think, arguments.answer)
    # Both come with vLLM, and only this command needs them.
    import uvicorn

    from meridian_patch.router.app import Router

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    router = Router(
        engines,
        arguments.answer_wait_s,
        hung_after_s=arguments.hung_after_s,
        allowed_origins=arguments.allowed_origins,
    )
    print(f"routing on http://{arguments.host}:{arguments.port}", flush=True)
    uvicorn.run(router.app(), host=arguments.host, port=arguments.port, log_level="warning")
    return 0


def _origins(text: str) -> list[str]:
    with suppress(ValueError):
        origins = parse_json(text)
        if isinstance(origins, list) and all(isinstance(origin, str) for origin in origins):
            return origins
    expected = 'a JSON list of origins, such as ["https://chat.example.com"]'
    raise argparse.ArgumentTypeError(f"is {text!r}, expected {expected}")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text!r}, expected seconds above 0")
    return value


def _seconds_or_never(text: str) -> float:
    return 0.0 if text.strip() == "0" else _seconds(text)
