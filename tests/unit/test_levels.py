"""Levels: what a request has had so far, and where that says how much is to come."""

import numpy as np
import pytest

from meridian_patch.policy.levels import Levels

BORDERS = (0, 1000, 2000, 4000, 8000, 16_000)


def levels_after(lengths, thinking=()):
    """The levels at the borders, after thoughts of these lengths."""
    levels = Levels(1000, 0.25)
    for length in lengths:
        levels.thought(0, int(length), has_ended=True)
    levels.review(thinking)
    return [levels.of(border) for border in BORDERS]


def test_levels_double():
    """Up to 512 tokens, then 1,024, then 2,048; all count before any thought has ended."""
    thoughts = (0, 511, 512, 1023, 1024, 2048, 30_000)
    levels = Levels(512, 0.25)
    assert [levels.of(n) for n in thoughts] == [0, 0, 1, 1, 2, 3, 6]
    assert not levels.review([])
    assert levels.of(10**9) == levels.of(10**8)


def test_a_prompt_counts_by_its_weight():
    """A quarter of it; the higher of that and of the thought decides."""
    assert [Levels(512, 0.25).of(0, n) for n in (2047, 2048, 4096)] == [0, 1, 2]
    assert [Levels(512, 0.25).of(n, 2048) for n in (511, 512, 1024)] == [1, 1, 2]
    assert Levels(512, 0.0).of(0, 100_000) == 0


@pytest.mark.parametrize("seed", range(5))
def test_all_levels_count_where_thoughts_have_a_heavy_tail(seed):
    """The longer a thought was, the longer it goes on."""
    lengths = 300 * np.random.default_rng(seed).pareto(0.9, 2000)
    found = levels_after(lengths)
    assert found[:5] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_no_level_counts_where_thoughts_are_alike(seed):
    """Who has had most ends first, as with a budget for thoughts."""
    lengths = np.random.default_rng(seed).uniform(1500, 2500, 300)
    assert levels_after(lengths)[:3] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_no_level_counts_where_a_length_tells_nothing(seed):
    """Exponential lengths: all have as much to come."""
    lengths = np.random.default_rng(seed).exponential(2000, 2000)
    assert levels_after(lengths)[:4] == [0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_long_thoughts_of_two_kinds_have_one_level(seed):
    """Short thoughts go first; long ones that are alike gain nothing by making room in turn."""
    rng = np.random.default_rng(seed)
    lengths = np.where(
        rng.random(300) < 0.6, rng.uniform(100, 500, 300), rng.uniform(6000, 9000, 300)
    )
    assert levels_after(lengths)[:4] == [0, 1, 1, 1]


def test_thoughts_that_have_not_ended_count():
    """Forty passed the first level, and none ended in it."""
    assert levels_after([], thinking=[1400] * 40)[:2] == [0, 0]
    assert levels_after([300] * 40)[:2] == [0, 1]


def test_thoughts_that_were_left_are_no_ends():
    """Clients that leave say nothing about lengths."""
    levels = Levels(1000, 0.25)
    for _ in range(100):
        levels.thought(0, 1400, has_ended=False)
    levels.review([])
    assert levels.of(1000) == 0


def test_later_thoughts_of_a_request_go_on_where_the_first_ended():
    """Their tokens count once, and each has its end."""
    once, twice = Levels(1000, 0.25), Levels(1000, 0.25)
    for _ in range(100):
        once.thought(0, 900, has_ended=True)
        once.thought(900, 1500, has_ended=True)
        twice.thought(0, 900, has_ended=True)
        twice.thought(0, 1500, has_ended=False)
        twice.thought(0, 600, has_ended=True)
    once.review([])
    twice.review([])
    assert np.allclose(once._tokens.sum() + 90_000 + 60_000, twice._tokens.sum())
    assert once._ends.sum() == twice._ends.sum()


def test_old_thoughts_are_forgotten():
    """After a change of load the levels follow it."""
    levels = Levels(1000, 0.25)
    rng = np.random.default_rng(0)
    for length in rng.uniform(1500, 2500, 3000):
        levels.thought(0, int(length), has_ended=True)
    levels.review([])
    assert levels.of(1000) == 0
    for length in np.minimum(300 * rng.pareto(0.9, 6000), 30_000):
        levels.thought(0, int(length), has_ended=True)
    assert levels.review([])
    assert [levels.of(border) for border in BORDERS[:4]] == [0, 1, 2, 3]
