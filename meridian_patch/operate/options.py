"""Checks values that several of these commands take."""

import argparse


def seconds(text: str) -> float:
    """A number of seconds above 0, for argparse.

    Raises:
        ArgumentTypeError: it is none.
        ValueError: it is no number.
    """
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def port(text: str) -> int:
    """A port to listen on, 0 for any free one, for argparse.

    Raises:
        ArgumentTypeError: it is none.
        ValueError: it is no whole number.
    """
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is no port between 0 and {2**16 - 1}")
    return value
