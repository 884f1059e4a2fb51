"""Levels: what a request has had so far, and where that says how much is to come."""

import numpy as np
import pytest

from meridian_patch.policy.levels import Levels, _index

BORDERS = (0, 1000, 2000, 4000, 8000, 16_000)


def levels_after(lengths, thinking=()):
    """The levels at the borders, after thoughts of these lengths."""
    levels = Levels(1000, 0.25)
    if thinking:
        levels.thought([0] * len(thinking), thinking)
    learn(levels, lengths)
    levels.review()
    return [levels.of(border) for border in BORDERS]


def learn(levels, lengths):
    for length in lengths:
        levels.thought([0], [int(length)])
        levels.ended(int(length))


def test_levels_double():
    """Up to 512 tokens, then 1,024, then 2,048; all count before any thought has ended."""
    thoughts = (0, 511, 512, 1023, 1024, 2048, 30_000)
    levels = Levels(512, 0.25)
    assert [levels.of(n) for n in thoughts] == [0, 0, 1, 1, 2, 3, 6]
    assert not levels.review()
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
    levels.thought([0] * 100, [1400] * 100)
    levels.review()
    assert levels.of(1000) == 0


def test_tokens_count_once_however_often_they_are_reported():
    """Whole, in pieces, and as the second thought of a request."""
    whole, pieces = Levels(1000, 0.25), Levels(1000, 0.25)
    whole.thought([0, 0], [3000, 1500])
    for before in range(0, 3000, 100):
        pieces.thought([before], [before + 100])
    pieces.thought([0], [900])
    pieces.thought([900], [1500])
    assert whole._tokens.tolist() == pieces._tokens.tolist()
    assert whole._tokens[:3].tolist() == [2000, 1500, 1000]


@pytest.mark.parametrize("first_tokens", [1, 64, 1024, 2**31])
def test_levels_stay_known_after_many_thoughts(first_tokens):
    """No level's evidence fades to nothing, where none is that long, or none as short."""
    for length in (100, 3 * first_tokens):
        levels = Levels(first_tokens, 0.25)
        for _ in range(100):
            levels.thought([0] * 400, [length] * 400)
            for _ in range(400):
                levels.ended(length)
        with np.errstate(all="raise"):
            levels.review()
        assert levels._joined[0] == 0


def test_an_index_is_the_best_chance_of_an_end_per_token():
    """Compared with trying each length at which one may stop."""
    levels = Levels(1000, 0.25)
    learn(levels, np.random.default_rng(3).exponential(3000, 500))
    rates = (levels._ends + 3) / (levels._tokens + levels._assumed_tokens)
    # One token after the other.
    best, alive, spent = 0.0, 1.0, 0.0
    for token in range(200_000):
        level = levels._raw(token)
        spent += alive
        alive *= 1 - rates[level]
        best = max(best, (1 - alive) / spent)
    ending = -np.expm1(-rates * levels._widths)
    assert _index(ending, ending / rates) == pytest.approx(best, rel=1e-2)


def test_old_thoughts_are_forgotten():
    """After a change of load the levels follow it."""
    levels = Levels(1000, 0.25)
    rng = np.random.default_rng(0)
    learn(levels, rng.uniform(1500, 2500, 3000))
    levels.review()
    assert levels.of(1000) == 0
    learn(levels, np.minimum(300 * rng.pareto(0.9, 6000), 30_000))
    assert levels.review()
    assert [levels.of(border) for border in BORDERS[:4]] == [0, 1, 2, 3]
