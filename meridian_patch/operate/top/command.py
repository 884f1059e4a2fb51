"""``meridian top``: options, and the loop that scrapes and draws."""

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from meridian_patch.errors import MeridianError
from meridian_patch.operate.http_client import ServerClient
from meridian_patch.operate.options import add_api_key, api_key, seconds
from meridian_patch.operate.top.keys import is_asked_to_quit, single_keys
from meridian_patch.operate.top.render import WIDTH, render
from meridian_patch.operate.top.source import LiveServer, recorded
from meridian_patch.operate.top.view import View, view

_DEFAULT_URL = "http://localhost:8000"
# As shells report a program that a closed pipe ended.
_PIPE_CLOSED = 141
_HISTORY_S = 60


def add_top(commands: Any) -> None:
    """Add ``top`` to the subcommands of the ``meridian`` command."""
    top = commands.add_parser("top", help="what a running server does, live; q quits")
    top.add_argument(
        "url",
        nargs="?",
        default=_DEFAULT_URL,
        help=f"http://host:port, or host:port (default {_DEFAULT_URL})",
    )
    top.add_argument("--interval", type=seconds, default=2.0, help="seconds per scrape (2)")
    top.add_argument("--once", action="store_true", help="print one window and end")
    top.add_argument("--json", action="store_true", dest="as_json", help="one object per window")
    top.add_argument("--record", type=Path, help="also append the scrapes to this file")
    top.add_argument("--replay", type=Path, help="show the scrapes of this file, ask no server")
    add_api_key(top)
    top.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    try:
        status = _show(parsed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # The reader has what it wanted: meridian top --json | head -1. Python flushes once more at
        # its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return status


def _show(parsed: argparse.Namespace) -> int:
    if parsed.replay is not None:
        return _replay(parsed)
    server = _server(parsed)
    return _once(server, parsed) if parsed.once else _watch(server, parsed)


def _server(parsed: argparse.Namespace) -> LiveServer:
    return LiveServer(ServerClient(parsed.url, api_key(parsed, parsed.url)), parsed.record)


def _replay(parsed: argparse.Namespace) -> int:
    """Show the windows of a recording one after the other; with --once the last one."""
    shown = [each for _, each in recorded(parsed.replay)]
    past: deque[View] = deque()
    for index, each in enumerate(shown):
        _keep(past, each)
        if not parsed.once or index == len(shown) - 1:
            _print(each, str(parsed.replay), parsed, past)
    return 0


def _once(server: LiveServer, parsed: argparse.Namespace) -> int:
    before = server.scrape()
    time.sleep(parsed.interval)
    _print(view(before, server.scrape()), server.url, parsed)
    return 0


def _watch(server: LiveServer, parsed: argparse.Namespace) -> int:
    """Scrape and draw until ``q``."""
    first = server.scrape()
    with single_keys() as has_keys:
        views = server.watch(first, lambda: is_asked_to_quit(parsed.interval, has_keys=has_keys))
        console = Console(highlight=False)
        if parsed.as_json or console.is_dumb_terminal or not console.is_terminal:
            # Nothing is drawn over: each window follows the one before.
            for each in views:
                _print(each, server.url, parsed)
                sys.stdout.flush()
            return 0
        waiting = Text(f"meridian top  {server.url}  waiting for a second scrape")
        past: deque[View] = deque()
        with Live(waiting, console=console, auto_refresh=False) as live:
            for each in views:
                if isinstance(each, View):
                    _keep(past, each)
                live.update(_screen(each, server.url, past), refresh=True)
    return 0


def _keep(past: deque[View], shown: View) -> None:
    """Add a window to those of the last minute."""
    past.append(shown)
    while sum(each.window_s for each in past) > _HISTORY_S and len(past) > 2:  # noqa: PLR2004 - a history has two
        past.popleft()


def _print(
    shown: View | MeridianError, source: str, parsed: argparse.Namespace, past: Iterable[View] = ()
) -> None:
    if parsed.as_json:
        told = {"error": str(shown)} if isinstance(shown, MeridianError) else shown.as_dict()
        print(json.dumps(told))
    else:
        console = Console(highlight=False)
        console.print(_screen(shown, source, past), width=min(WIDTH, console.width))


def _screen(shown: View | MeridianError, source: str, past: Iterable[View] = ()) -> RenderableType:
    return (
        Text(f"{shown}; trying again")
        if isinstance(shown, MeridianError)
        else render(shown, source, tuple(past))
    )
