"""The calibration's guarantee on simulated problems, and its bounds against each other."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_patch.bench.statistics import clopper_pearson, hoeffding, trials_needed
from meridian_patch.calibrate.calibration import calibrate
from meridian_patch.calibrate.records import Record, Stop

TOLERANCE, RISK = 0.05, 0.1
REPETITIONS = 600
THRESHOLDS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def binomial_cdf(hits, trials, share):
    return math.fsum(
        math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(hits + 1)
    )


@given(st.integers(1, 60), st.data(), st.floats(0.01, 0.5))
def test_exact_bound_is_where_the_count_becomes_unlikely(trials, data, risk):
    """By the definition, in whole numbers; never above Hoeffding's."""
    hits = data.draw(st.integers(0, trials - 1))
    bound = clopper_pearson(hits, trials, risk)
    assert binomial_cdf(hits, trials, bound) == pytest.approx(risk, rel=1e-6)
    assert hits / trials < bound <= hoeffding(hits, trials, risk) + 1e-12


@given(st.floats(0.005, 0.5), st.floats(0.01, 0.5))
def test_problems_needed_are_just_enough(tolerance, risk):
    """So many clean problems carry the bound, one fewer does not."""
    needed = trials_needed(tolerance, risk)
    assert clopper_pearson(0, needed, risk) <= tolerance * (1 + 1e-9)
    if needed > 1:
        assert clopper_pearson(0, needed - 1, risk) > tolerance * (1 - 1e-9)


def simulated(rng, count, loss_shares):
    """Problems of a world in which each threshold loses such a share; a bolder one stops sooner.

    Losses of one problem under several thresholds come from one number, so that they depend on
    each other as in a real set.
    """
    fate = rng.random(count)
    return [
        Record(
            str(n),
            1000,
            True,
            # The boldest threshold's stop comes first and only it fires there.
            [
                Stop(900 - 100 * index, bool(fate[n] >= loss_shares[index]), value - 0.5)
                for index, value in reversed(list(enumerate(THRESHOLDS)))
            ],
        )
        for n in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_shares",
    [
        pytest.param((0.0, 0.01, 0.03, 0.052, 0.08, 0.2), id="rising"),
        pytest.param((0.051,) * 6, id="all just too high"),
        pytest.param((0.0, 0.06, 0.0, 0.06, 0.01, 0.06), id="not monotone"),
        pytest.param((0.04, 0.051, 0.051, 0.051, 0.051, 0.051), id="many chances to err"),
    ],
)
def test_the_bound_holds_as_often_as_promised(loss_shares):
    """Over labelled sets, the chosen threshold loses too much in at most a share of RISK."""
    rng = np.random.default_rng(7)
    wrong = chosen = 0
    for _ in range(REPETITIONS):
        records = simulated(rng, 150, loss_shares)
        result = calibrate(records, THRESHOLDS, fires_below=True, tolerance=TOLERANCE, risk=RISK)
        if result.chosen is not None:
            chosen += 1
            wrong += loss_shares[THRESHOLDS.index(result.chosen.threshold)] > TOLERANCE
    # Three standard errors above what is promised.
    assert wrong / REPETITIONS <= RISK + 3 * math.sqrt(RISK * (1 - RISK) / REPETITIONS)
    if loss_shares[0] == 0.0:
        assert chosen == REPETITIONS
