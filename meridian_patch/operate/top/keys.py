"""Reads single keys from a terminal while a screen is drawn."""

import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_keys() -> Iterator[bool]:
    """Whether keys can be read one by one; the terminal is restored at the end."""
    if not sys.stdin.isatty():
        yield False
        return
    settings = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


def is_asked_to_quit(seconds: float, *, has_keys: bool) -> bool:
    """Wait; True as soon as ``q`` is pressed.

    Args:
        seconds: how long to wait for it.
        has_keys: keys can be read; otherwise only an interrupt ends the wait early.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not has_keys:
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in {"q", "Q", ""}:
            return True
    return False
