"""Makes SIGTERM do what Ctrl-C does, so that servers are ended and results written."""

import signal
from types import FrameType


def end_like_ctrl_c() -> None:
    """From now on, SIGTERM and SIGINT raise KeyboardInterrupt in the main thread."""
    # Shells start background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # A signal, not an exception: asyncio handles SIGINT by a handler of its own.
    signal.raise_signal(signal.SIGINT)
