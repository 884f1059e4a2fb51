"""How a bench ends: by SIGTERM as by Ctrl-C, with results written, and by which exit code."""

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from meridian_patch.errors import MeridianError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def end_like_ctrl_c() -> None:
    """From now on, SIGTERM and SIGINT raise KeyboardInterrupt in the main thread."""
    # Shells start background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)


def run_program(name: str, run: Callable[[], int]) -> NoReturn:
    """Run a program and exit with its code; an error of ours is one sentence.

    Args:
        name: before each sentence.
        run: returns the exit code. ``EXIT_FAILED`` stands for an error, ``EXIT_INTERRUPTED`` for
            Ctrl-C.
    """
    end_like_ctrl_c()
    try:
        code = run()
    except MeridianError as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # A signal, not an exception: asyncio handles SIGINT by a handler of its own.
    signal.raise_signal(signal.SIGINT)
