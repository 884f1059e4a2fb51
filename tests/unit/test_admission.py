"""KVDemand of lengths and of the pool's peak."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meridian_patch.policy.admission import count_admissible, peak_tokens
from meridian_patch.policy.output_lengths import LengthHistogram

# Held tokens and growth.
forecasts = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 200)), max_size=8)


def table(requests):
    return np.array(requests, float).reshape(-1, 2)


@given(forecasts)
def test_the_peak_is_that_of_a_simulation(requests):
    """All grow by a token per step and leave once grown: the greatest sum on the way."""
    most = 0.0
    for step in range(202):
        most = max(most, sum(held + step for held, growth in requests if growth >= step))
    assert peak_tokens(table(requests)) == most


@given(forecasts, forecasts, st.integers(1, 4000))
def test_what_is_admitted_fits_and_the_next_would_not(running, waiting, pool):
    """The count is the longest prefix that fits; an empty engine takes one in any case."""
    admitted = count_admissible(table(running), table(waiting), pool)
    together = running + waiting[:admitted]
    if admitted and len(together) > 1:
        assert peak_tokens(table(together)) <= pool
    if admitted < len(waiting):
        assert peak_tokens(table([*together, waiting[admitted]])) > pool
    if waiting and not running:
        assert admitted >= 1


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
