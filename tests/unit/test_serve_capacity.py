"""What a server completes per second, of requests that came at once."""

import pytest

from meridian_patch.bench.served.capacity import completed_per_s


def test_the_last_tenth_does_not_count():
    """Long requests that run alone at the end are no sign of a slow server."""
    ends = [float(second) for second in range(1, 10)]
    assert completed_per_s([*ends, 100.0]) == pytest.approx(1.0)
    assert completed_per_s([100.0, *reversed(ends)]) == pytest.approx(1.0)


def test_a_single_request_counts():
    assert completed_per_s([0.5]) == 2.0
