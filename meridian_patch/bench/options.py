"""Reads values of the command line; the error for a wrong one names the option."""

import math

from meridian_patch.errors import BenchError


def read_whole(option: str, text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise BenchError(f"{option} is {text!r}, expected a whole number above 0")
    return int(text)


def read_positive(option: str, text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise BenchError(f"{option} is {text!r}, expected a number above 0")
    return value


def read_seeds(text: str) -> list[int]:
    """Seeds such as ``1,2`` or ``11-15``, each once."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise BenchError(f"--seeds is {text!r}, expected seeds such as 1,2 or 11-15")
        seeds += range(int(first), int(last if dash else first) + 1)
    if not seeds:
        raise BenchError(f"--seeds is {text!r}, which holds none; expected the lower number first")
    return list(dict.fromkeys(seeds))
