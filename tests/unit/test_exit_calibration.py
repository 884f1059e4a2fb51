"""Choosing a threshold: what is counted, what is chosen, and what is refused."""

import math

import pytest

from meridian_patch.bench.statistics import (
    clopper_pearson,
    conformal_risk,
    hoeffding,
    trials_needed,
)
from meridian_patch.calibrate.calibration import bootstrap_bands, calibrate
from meridian_patch.calibrate.records import Record, Stop, ending
from meridian_patch.errors import CalibrationError


def record(name, *stops, right=True, tokens=1000):
    """A problem whose stops are (think tokens, value, is_correct)."""
    return Record(name, tokens, right, [Stop(at, ok, value) for at, value, ok in stops])


def many(count=300):
    """Of 100 problems all are right when stopped at 500, one is wrong when stopped at 200."""
    return [
        record(str(n), (200, 0.5, n % 100 != 0), (500, 0.05, True), right=n % 10 != 9)
        for n in range(count)
    ]


def choose(records, thresholds=(0.01, 0.1, 1.0), **values):
    settings = {"fires_below": True, "tolerance": 0.03, "risk": 0.05}
    return calibrate(records, thresholds, **(settings | values))


def test_the_first_stop_that_fires_counts():
    """Below for EAT, above for RPDI; NaN and stops at the natural end do not fire."""
    one = record("a", (100, math.nan, False), (200, 0.5, False), (500, 0.1, True), right=False)
    assert ending(one, 0.2, fires_below=True) == (500, True)
    assert ending(one, 1.0, fires_below=True) == (200, False)
    assert ending(one, 0.05, fires_below=True) == (1000, False)
    assert ending(one, 0.2, fires_below=False) == (200, False)
    late = record("b", (1000, 0.1, False))
    assert ending(late, 1.0, fires_below=True) == (1000, True)


def test_the_largest_safe_saving_is_chosen():
    """All figures of the curve, by hand."""
    result = choose(many())
    careful, middle, bold = result.curve
    assert [p.threshold for p in result.curve] == [0.01, 0.1, 1.0]
    assert (careful.saving_ratio, careful.lost, careful.won) == (0.0, 0, 0)
    assert (middle.saving_ratio, middle.lost, middle.won) == (0.5, 0, 30)
    assert (bold.saving_ratio, bold.lost, bold.won) == (pytest.approx(0.8), 3, 30)
    assert result.natural_accuracy == pytest.approx(0.9)
    assert bold.accuracy == pytest.approx(0.99)
    assert bold.is_safe
    assert result.chosen == bold
    assert choose(many(), tolerance=0.02).chosen == choose(many(), tolerance=0.02).curve[1]


def test_behind_a_threshold_that_fails_none_is_safe():
    """A bolder one may look better by chance; the order was fixed before."""
    lossy = [
        record(str(n), (200, 0.9, True), (500, 0.5, n % 10 != 0), (600, 0.05, True))
        for n in range(300)
    ]
    result = choose(lossy)
    assert [point.lost for point in result.curve] == [0, 0, 0]
    result = choose(lossy, (0.1, 0.6, 1.0))
    assert [(point.lost, point.is_safe) for point in result.curve] == [
        (0, True),
        (30, False),
        (0, False),
    ]
    assert result.chosen.threshold == 0.1


def test_thresholds_of_rpdi_are_tested_from_above():
    """A larger lambda is more careful."""
    result = choose(many(), (1.5, 3.0, 2.0), fires_below=False)
    assert [point.threshold for point in result.curve] == [3.0, 2.0, 1.5]


def test_nothing_safe_is_nothing_chosen():
    """The curve is still there to be read."""
    bad = [record(str(n), (200, 0.001, False)) for n in range(300)]
    result = choose(bad)
    assert result.chosen is None
    assert [point.lost for point in result.curve] == [300] * 3


def test_unlabelled_problems_are_left_out_and_counted():
    """They say nothing of accuracy."""
    result = choose([*many(), *(record(f"u{n}", right=None) for n in range(7))])
    assert (result.num_problems, result.num_unlabelled) == (300, 7)


@pytest.mark.parametrize(
    ("records", "values", "message"),
    [
        ([], {}, "none of 0 problems has a reference answer"),
        ([record("u", right=None)] * 9, {}, "none of 9 problems has a reference answer"),
        (many(98), {}, "98 labelled problems are too few: .* takes at least 99, none of them lost"),
        (many(298), {"tolerance": 0.01}, "at least 299"),
        ([record("w", right=False)] * 300, {}, "only 0 of 300 natural answers are right"),
        (many(), {"tolerance": 0.0}, "tolerance is 0.0, expected a share between 0 and 1"),
        (many(), {"risk": 1.0}, "risk is 1.0, expected a share between 0 and 1"),
        (many(), {"thresholds": ()}, "no thresholds"),
        ([record("e", tokens=0)] * 300, {}, "has no think tokens"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(records, values, message):
    """One sentence that says what is missing."""
    with pytest.raises(CalibrationError, match=message):
        choose(records, **values)


def test_as_many_problems_as_needed_are_enough():
    """The number in the refusal is exact."""
    clean = [record(str(n), (500, 0.05, True)) for n in range(99)]
    assert choose(clean).chosen.saving_ratio == 0.5


def test_bands_hold_the_estimate():
    """Deterministic, and narrow where all problems are alike."""
    bands = bootstrap_bands(many(), 1.0, fires_below=True)
    assert bands.saving_ratio == pytest.approx((0.8, 0.8))
    low, high = bands.accuracy_loss
    assert low < -0.09 < high < 0
    assert bands == bootstrap_bands(many(), 1.0, fires_below=True)
    with pytest.raises(CalibrationError, match="none of 1 problems"):
        bootstrap_bands([record("u", right=None)], 1.0, fires_below=True)


def test_exact_bound_by_known_values():
    """0 of n by hand; 3 of 300 and 10 of 100 as the beta quantiles of other software have them."""
    assert clopper_pearson(0, 99, 0.05) == pytest.approx(1 - 0.05 ** (1 / 99), rel=1e-12)
    assert clopper_pearson(10, 100, 0.05) == pytest.approx(0.16371, abs=1e-4)
    assert clopper_pearson(5, 5, 0.05) == 1.0
    assert trials_needed(0.05, 0.05) == 59
    assert conformal_risk(3, 99) == 0.04
    assert hoeffding(0, 150, 0.05) == pytest.approx(0.0999, abs=1e-4)
