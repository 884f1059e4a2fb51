"""Reads values of the command line; the error for a wrong one names the option."""

import math
import re

from meridian_patch.config.validate import shown
from meridian_patch.errors import BenchError

# Python refuses to read thousands of digits.
WHOLE = re.compile("[0-9]{1,15}")
_MOST_SEEDS = 10_000


def read_whole(option: str, text: str) -> int:
    """A whole number above 0."""
    if not WHOLE.fullmatch(text) or int(text) == 0:
        raise BenchError(f"{option} is {shown(text)}, expected a whole number above 0")
    return int(text)


def read_positive(option: str, text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise BenchError(f"{option} is {shown(text)}, expected a number above 0")
    return value


def read_seeds(text: str) -> list[int]:
    """Seeds such as ``1,2`` or ``11-15``, each once."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not WHOLE.fullmatch(first) or (dash and not WHOLE.fullmatch(last)):
            raise BenchError(f"--seeds is {shown(text)}, expected seeds such as 1,2 or 11-15")
        found = range(int(first), int(last if dash else first) + 1)
        if len(seeds) + len(found) > _MOST_SEEDS:
            raise BenchError(f"--seeds is {shown(text)}, expected at most {_MOST_SEEDS} seeds")
        seeds += found
    if not seeds:
        raise BenchError(f"--seeds is {text!r}, which holds none; expected the lower number first")
    return list(dict.fromkeys(seeds))
