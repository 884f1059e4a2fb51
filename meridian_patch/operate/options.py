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
