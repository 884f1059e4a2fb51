"""``meridian top``: options, and the loop that scrapes and draws."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from meridian_patch.errors import MeridianError
from meridian_patch.operate.http_client import ServerClient, read_key
from meridian_patch.operate.options import seconds
from meridian_patch.operate.scrape import Scrape, parse
from meridian_patch.operate.top import recording
from meridian_patch.operate.top.keys import is_asked_to_quit, single_keys
from meridian_patch.operate.top.render import WIDTH, render
from meridian_patch.operate.top.view import View, check_vllm, view

_DEFAULT_URL = "http://localhost:8000"
# As shells report a program that a closed pipe ended.
_PIPE_CLOSED = 141


def add_top(commands: Any) -> None:
    """Add ``top`` to the subcommands of the ``meridian`` command."""
    top = commands.add_parser("top", help="what a running server does, live; q quits")
    top.add_argument("url", nargs="?", default=_DEFAULT_URL, help=f"default {_DEFAULT_URL}")
    top.add_argument("--interval", type=seconds, default=2.0, help="seconds per scrape (2)")
    top.add_argument("--once", action="store_true", help="print one window and end")
    top.add_argument("--json", action="store_true", dest="as_json", help="one object per window")
    top.add_argument("--record", type=Path, help="also append the scrapes to this file")
    top.add_argument("--replay", type=Path, help="show the scrapes of this file, ask no server")
    top.add_argument("--api-key-file", type=Path, help="file with the server's API key")
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
    client = ServerClient(parsed.url, read_key(parsed.api_key_file))
    return _once(client, parsed) if parsed.once else _watch(client, parsed)


def _replay(parsed: argparse.Namespace) -> int:
    """Show the windows of a recording one after the other; with --once the last one."""
    shown = list(_windows(recording.read(parsed.replay)))
    for each in shown[-1:] if parsed.once else shown:
        _print(each, str(parsed.replay), parsed)
    return 0


def _windows(scrapes: Iterator[Scrape]) -> Iterator[View]:
    before = next(scrapes)
    for after in scrapes:
        # The clock may have been set back, and a recording may be of several sessions.
        if after.at_s > before.at_s:
            yield view(before, after)
        before = after


def _once(client: ServerClient, parsed: argparse.Namespace) -> int:
    before = _scrape(client, parsed)
    time.sleep(parsed.interval)
    _print(view(before, _scrape(client, parsed)), client.url, parsed)
    return 0


def _watch(client: ServerClient, parsed: argparse.Namespace) -> int:
    """Scrape and draw until ``q``."""
    first = _scrape(client, parsed)
    with single_keys() as has_keys:
        views = _views(client, first, parsed, has_keys=has_keys)
        if parsed.as_json:
            for each in views:
                told = {"error": str(each)} if isinstance(each, MeridianError) else each.as_dict()
                print(json.dumps(told), flush=True)
            return 0
        waiting = Text(f"meridian top  {client.url}  waiting for a second scrape")
        with Live(waiting, console=Console(highlight=False), auto_refresh=False) as live:
            for each in views:
                if isinstance(each, MeridianError):
                    live.update(Text(f"{each}; trying again"), refresh=True)
                else:
                    live.update(render(each, client.url), refresh=True)
    return 0


def _views(
    client: ServerClient, first: Scrape, parsed: argparse.Namespace, *, has_keys: bool
) -> Iterator[View | MeridianError]:
    """A view per interval until ``q``; an error where the server does not tell."""
    before = first
    while not is_asked_to_quit(parsed.interval, has_keys=has_keys):
        try:
            after = _scrape(client, parsed)
        except MeridianError as error:
            yield error
            continue
        yield view(before, after)
        before = after


def _scrape(client: ServerClient, parsed: argparse.Namespace) -> Scrape:
    text = client.metrics()
    now, time_of_day = time.monotonic(), time.time()
    scrape = parse(text, now)
    check_vllm(scrape)
    if parsed.record is not None:
        # Recordings of several starts of the machine may share a file: the time of day orders them.
        recording.append(parsed.record, text, time_of_day)
    return scrape


def _print(shown: View, source: str, parsed: argparse.Namespace) -> None:
    if parsed.as_json:
        print(json.dumps(shown.as_dict()))
    else:
        console = Console(highlight=False)
        console.print(render(shown, source), width=min(WIDTH, console.width))
