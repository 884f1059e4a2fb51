"""Thoughts of a calibration that the loop breaker would have closed."""

from meridian_patch.calibrate.loops import count_loops
from meridian_patch.calibrate.observe import Natural
from meridian_patch.config.schema import ExitConfig


def natural(name, thought, is_correct):
    return Natural(None, name, [], thought, [], 1, is_correct)


def test_loops_are_counted_with_their_answers():
    """By how often the pattern must stand there; nothing below the floor counts."""
    thoughts = [[1, 2, 3, 4] * 5, [1, 2, 3, 4] * 3 + list(range(10, 90)), list(range(60))]
    naturals = [natural(f"p{n}", thought, n != 0) for n, thought in enumerate(thoughts)]
    sizes = {"loop_min_pattern_size": 4, "loop_max_pattern_size": 8, "loop_min_count": 5}
    counted = count_loops(naturals, ExitConfig(min_think_tokens=0, **sizes))
    found = [[2, 2, 1], [3, 2, 1], [4, 1, 0], [5, 1, 0]]
    assert counted["closed"] == [*found, [6, 0, 0], [8, 0, 0], [12, 0, 0]]
    floored = count_loops(naturals, ExitConfig(min_think_tokens=20, **sizes))
    assert floored["closed"][1] == [3, 1, 0]
