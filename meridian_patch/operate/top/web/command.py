"""``meridian top --web``: serves the page, and adds each window to it."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from meridian_patch.operate.top.source import LiveServer, recorded
from meridian_patch.operate.top.web.history import History
from meridian_patch.operate.top.web.server import serving

HOST = "127.0.0.1"
PORT = 8090


def show_live(
    server: LiveServer, interval_s: float, is_ended: Callable[[], bool], host: str, port: int
) -> None:
    """Show a running server until the end is asked for; one that is not up yet is waited for.

    Args:
        server: asked once per interval, however many browsers look.
        interval_s: seconds per scrape.
        is_ended: waits for the next scrape; True: there is to be none.
        host: to listen on.
        port: to listen on.

    Raises:
        ListenError: the page cannot be served there.
    """
    history = History(server.url, interval_s)
    with serving(history, host, port) as (address, is_loopback):
        _say(address, server.url, host, is_loopback=is_loopback)
        for shown in server.watch(None, is_ended):
            history.add(time.time(), shown)


def show_recording(path: Path, is_ended: Callable[[], bool], host: str, port: int) -> None:
    """Show all windows of a recording until the end is asked for.

    Args:
        path: of the recording.
        is_ended: waits; True: the end was asked for.
        host: to listen on.
        port: to listen on.

    Raises:
        ScrapeError: the file is no recording of a vLLM server.
        ListenError: the page cannot be served there.
    """
    history = History(str(path), None)
    for ended_at_s, shown in recorded(path):
        history.add(ended_at_s, shown)
    with serving(history, host, port) as (address, is_loopback):
        _say(address, str(path), host, is_loopback=is_loopback)
        while not is_ended():
            pass


def _say(address: str, source: str, host: str, *, is_loopback: bool) -> None:
    if not is_loopback:
        print(
            f"meridian: warning: with --host {host} everyone who can reach this machine can see "
            "this page; there is no password",
            file=sys.stderr,
            flush=True,
        )
    print(f"meridian top: {address} shows {source}; Ctrl-C ends it", flush=True)
