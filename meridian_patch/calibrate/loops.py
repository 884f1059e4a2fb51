"""Counts the thoughts of a calibration that the loop breaker would have closed."""

from collections.abc import Sequence
from typing import Any, Final

from meridian_patch.calibrate.observe import Natural
from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import Signals
from meridian_patch.exit.strategies.loop import LoopBreaker

MIN_COUNTS: Final = (2, 3, 4, 6, 8, 12)
"""Settings of ``loop_min_count`` that are counted, beside the configuration's."""

_NO_SIGNALS: Final = Signals((), (), (), ())


def count_loops(naturals: Sequence[Natural], config: ExitConfig) -> dict[str, Any]:
    """Thoughts with a loop, by how often its pattern must stand there.

    Nothing is chosen: what an answer behind the close would be is not known, so a right answer of
    such a thought may be lost, and a wrong one may be won.

    Args:
        naturals: thoughts and whether their answers were right.
        config: the sizes of patterns, and the floor.

    Returns:
        The settings; ``closed``: rows of a ``loop_min_count``, the number of thoughts that would
        have been closed, and how many of their answers were right.
    """
    counts = sorted({*MIN_COUNTS, config.loop_min_count})
    closed = []
    for count in counts:
        looping = [each for each in naturals if _loops(each.thought, config, count)]
        closed.append([count, len(looping), sum(each.is_correct for each in looping)])
    return {
        "max_pattern_size": config.loop_max_pattern_size,
        "min_pattern_size": config.loop_min_pattern_size,
        "min_think_tokens": config.min_think_tokens,
        "closed": closed,
    }


def _loops(thought: Sequence[int], config: ExitConfig, count: int) -> bool:
    breaker = LoopBreaker(config.loop_max_pattern_size, config.loop_min_pattern_size, count)
    return breaker.accept(thought, _NO_SIGNALS, max(config.min_think_tokens - 1, 0)) is not None
