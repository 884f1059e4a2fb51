"""Expected further tokens of requests, from the lengths of those that ended."""

import numpy as np

from meridian_patch.policy.output_lengths import LengthHistogram


def test_residual_life_of_what_was_seen():
    """Half end at 100 tokens and half at 1 000: past 100, some 900 are still to come."""
    lengths = LengthHistogram()
    for _ in range(100):
        lengths.add(100)
        lengths.add(1000)
    fresh, older, near_end, beyond = lengths.remaining(np.array([0, 200, 950, 5000]))
    assert 500 < fresh < 600
    assert 750 < older < 850
    assert 1 <= near_end < 100
    assert beyond > 1000


def test_nothing_is_forecast_from_a_handful():
    """Twenty ends are needed."""
    lengths = LengthHistogram()
    for _ in range(19):
        lengths.add(50)
    assert lengths.remaining(np.array([0])) is None
    lengths.add(50)
    assert lengths.remaining(np.array([0])) is not None
