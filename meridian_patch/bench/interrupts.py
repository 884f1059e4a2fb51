"""Lets a polite end of the process do what Ctrl-C does: servers are ended, results written."""

import signal
from types import FrameType


def end_like_ctrl_c() -> None:
    """From now on, SIGTERM and SIGINT raise KeyboardInterrupt in the main thread."""
    # A job in the background is started with Ctrl-C ignored, and would not end on request.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # Not raised here: asyncio has a handler of its own for this signal and unwinds by it.
    signal.raise_signal(signal.SIGINT)
