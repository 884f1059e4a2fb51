"""Streams of think tokens for the exit tests, and what an eager controller would decide."""

import math

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import Signals
from meridian_patch.exit.text_breaks import Breaks

PLAIN, COMMA, DOT, LINE, PARAGRAPH, NEWLINE = range(6)
BREAKS = Breaks(
    sentence=frozenset({DOT, LINE, PARAGRAPH, NEWLINE}),
    line=frozenset({LINE, PARAGRAPH, NEWLINE}),
    paragraph=frozenset({PARAGRAPH}),
    newline=frozenset({NEWLINE}),
)


def row(entropy=1.0, end_prob=0.0):
    return (entropy, 10.0, 0.5, end_prob)


def rows_of(entropies):
    return [row(entropy) for entropy in entropies]


def signals_of(entropies, end_probs=None):
    count = len(entropies)
    return Signals(entropies, [10.0] * count, [0.5] * count, end_probs or [0.0] * count)


def config_of(**values):
    """No strategy, no floor and no grace, but for what is said."""
    nothing = {"mode": "enforce", "min_think_tokens": 0, "grace_tokens": 0}
    return ExitConfig(**(nothing | {"eat": False, "rpdi": False} | values))


def rpdi_by_definition(entropies, window):
    """RPDI at each token from the whole series; NaN before a window is full."""
    finite = []
    ratios = []
    for entropy in entropies:
        if math.isfinite(entropy):
            finite.append(entropy)
        whole = math.fsum(finite)
        is_defined = math.isfinite(entropy) and len(finite) >= window and whole > 0
        last = math.fsum(finite[-window:]) / window
        ratios.append(last / (whole / len(finite)) if is_defined else math.nan)
    return ratios
