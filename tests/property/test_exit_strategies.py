"""Strategies equal their written definitions, however the tokens are cut into steps."""

import math

from exit_streams import BREAKS, DOT, PLAIN, rpdi_by_definition, signals_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meridian_patch.exit.probe_schedule import ProbeSchedule
from meridian_patch.exit.strategies.eat import Eat
from meridian_patch.exit.strategies.hard_cap import HardCap
from meridian_patch.exit.strategies.loop import LoopBreaker
from meridian_patch.exit.strategies.pattern import PatternExit
from meridian_patch.exit.strategies.rpdi import Rpdi
from meridian_patch.exit.text_breaks import Breaks

# Signals are float32: no sum of them is so small that a quotient of it is 0.
FINITE = st.floats(0, 12, width=32)
ENTROPY = st.one_of(
    FINITE, st.sampled_from([0.0, 1e-9, 1.0, 1e6]), st.sampled_from([math.nan, math.inf])
)
# Closer to lambda than this, rounding decides.
TIE = 1e-9


def chunks(data, items):
    """The items in pieces of random length, as steps bring them."""
    pieces, begin = [], 0
    while begin < len(items):
        size = data.draw(st.integers(1, 7))
        pieces.append(items[begin : begin + size])
        begin += size
    return pieces


@given(
    st.data(),
    st.lists(st.tuples(ENTROPY, st.sampled_from([PLAIN, DOT])), max_size=120),
    st.integers(1, 12),
    st.floats(1.05, 4),
    st.integers(0, 60),
)
def test_rpdi_is_its_definition(data, stream, window, threshold, floor):
    """It fires where the quotient over the whole series, in float64, first passes lambda."""
    ratios = rpdi_by_definition([entropy for entropy, _ in stream], window)
    fires = [
        index
        for index, (_, token) in enumerate(stream)
        if index >= floor and token == DOT and ratios[index] > threshold
    ]
    ties = [ratio for ratio in ratios if abs(ratio - threshold) < TIE]
    rpdi = Rpdi(window, threshold, BREAKS.sentence)
    before, firings = 0, []
    for piece in chunks(data, stream):
        entropies, tokens = zip(*piece, strict=True)
        firing = rpdi.accept(tokens, signals_of(entropies), max(0, floor - before))
        if firing:
            firings.append(before + firing.at)
        before += len(piece)
    if not ties:
        assert firings[:1] == fires[:1]
    expected = next((r for r in reversed(ratios) if not math.isnan(r)), None)
    if expected is not None and rpdi.ratio is not None:
        assert math.isclose(rpdi.ratio, expected, rel_tol=1e-9)


@given(st.data(), st.lists(FINITE, min_size=1, max_size=80), st.integers(1, 12))
def test_rpdi_does_not_depend_on_the_steps(data, entropies, window):
    """To the last bit: no threshold is passed in one step and missed in two."""
    at_once, in_steps = (Rpdi(window, 2.0, BREAKS.sentence) for _ in range(2))
    at_once.accept([PLAIN] * len(entropies), signals_of(entropies), 0)
    for piece in chunks(data, entropies):
        in_steps.accept([PLAIN] * len(piece), signals_of(piece), 0)
    assert at_once.ratio == in_steps.ratio


def eat_by_definition(probes, alpha):
    """Debiased variances, as written in the docstring."""
    mean = variance = 0.0
    variances = []
    for n, x in enumerate(probes, start=1):
        mean = x if n == 1 else alpha * x + (1 - alpha) * mean
        variance = 0.0 if n == 1 else alpha * (x - mean) ** 2 + (1 - alpha) * variance
        variances.append(variance / (1 - (1 - alpha) ** n))
    return variances


@given(
    st.lists(ENTROPY, max_size=60),
    st.floats(0.05, 0.9),
    st.floats(1e-6, 1.0),
    st.integers(1, 10),
    st.one_of(st.none(), st.floats(0.1, 10)),
)
def test_eat_is_its_recurrences(probes, alpha, delta, warmup, most):
    """Each probe fires exactly when the written rule says so."""
    eat = Eat(alpha, delta, warmup, most)
    finite = [x for x in probes if math.isfinite(x)]
    variances = iter(enumerate(eat_by_definition(finite, alpha), start=1))
    for x in probes:
        why = eat.probed(x)
        if not math.isfinite(x):
            assert why is None
            continue
        n, variance = next(variances)
        assert math.isclose(eat.variance, variance, rel_tol=1e-12)
        is_sure = most is None or x < most
        assert (why is not None) == (n > warmup and variance < delta and is_sure)


@given(st.data(), st.integers(1, 50), st.integers(0, 20), st.integers(0, 30), st.integers(0, 40))
def test_hard_cap_is_a_comparison(data, most, lead, already, floor):
    """It fires at the first allowed token with as many tokens before it."""
    cap = HardCap(most, min(lead, most), already)
    fired, before = None, 0
    for piece in chunks(data, [PLAIN] * 60):
        firing = cap.accept(piece, signals_of([1.0] * len(piece)), max(0, floor - before))
        if firing and fired is None:
            fired = before + firing.at
        before += len(piece)
    expected = max(floor, most - min(lead, most) - already - 1)
    assert fired == (expected if expected < 60 else None)


PARAGRAPHS = Breaks(frozenset(), frozenset({1, 2}), frozenset({3}), frozenset({2}))


@given(st.data(), st.lists(st.integers(0, 3), max_size=80), st.integers(1, 9), st.integers(0, 20))
def test_probes_do_not_depend_on_the_steps(data, tokens, min_gap, more):
    """Several at once give the last of what one by one give, by the written rule."""
    due, last = [], 0
    for count, token in enumerate(tokens, start=1):
        is_blank = token == 3 or (token == 2 and count > 1 and tokens[count - 2] in {1, 2})
        if count - last >= min_gap + more or (is_blank and count - last >= min_gap):
            due.append(count)
            last = count
    schedule = ProbeSchedule(min_gap, min_gap + more, PARAGRAPHS)
    before, found = 0, []
    for piece in chunks(data, tokens):
        found.append((before, schedule.accept(piece), before + len(piece)))
        before += len(piece)
    for begin, at, end in found:
        assert at == max((count for count in due if begin < count <= end), default=None)
    assert schedule.due_by == last + min_gap + more


def repeats(tokens, most, least, times):
    """Whether the last tokens are one pattern so many times, as vLLM looks for it."""
    return any(
        tokens[-size * times :] == tokens[-size:] * times
        for size in range(max(least, 1), most + 1)
        if size * times <= len(tokens)
    )


# Text with loops in it: words, each of them several times, or slightly changed.
LOOPS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 6)), max_size=12
).map(lambda words: [token for word, times in words for token in word * times])


@settings(max_examples=400)
@given(
    st.data(),
    LOOPS,
    st.integers(1, 6).flatmap(lambda most: st.tuples(st.just(most), st.integers(0, most))),
    st.integers(2, 4),
    st.integers(0, 40),
)
def test_the_loop_breaker_is_its_definition(data, tokens, sizes, times, floor):
    """It fires where the written rule first holds at or above the floor, and not twice."""
    holds = [
        index for index in range(floor, len(tokens)) if repeats(tokens[: index + 1], *sizes, times)
    ]
    breaker, before, fired = LoopBreaker(*sizes, times), 0, []
    for piece in chunks(data, tokens):
        firing = breaker.accept(piece, signals_of([1.0] * len(piece)), max(0, floor - before))
        if firing:
            fired.append(before + firing.at)
        before += len(piece)
        assert len(breaker._tokens) <= 2 * sizes[0] * times + 7
    assert fired == holds[:1]
    assert not holds or holds[0] + 1 >= breaker.fires_from


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1)


@given(
    st.data(),
    st.lists(SEQUENCES.map(tuple), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 20),
)
def test_the_pattern_exit_is_its_definition(data, patterns, tokens, floor):
    """It fires at the first token at or above the floor that completes a sequence of a pattern."""
    ends = [
        index
        for index in range(floor, len(tokens))
        if any(
            tuple(tokens[: index + 1][-len(ids) :]) == ids
            for pattern in patterns
            for ids in pattern
        )
    ]
    pattern_exit, before, fired = PatternExit(patterns), 0, []
    for piece in chunks(data, tokens):
        firing = pattern_exit.accept(piece, signals_of([1.0] * len(piece)), max(0, floor - before))
        if firing and not fired:
            fired.append(before + firing.at)
            number = int(firing.why.split()[1])
            last = tokens[: fired[0] + 1]
            assert any(tuple(last[-len(ids) :]) == ids for ids in patterns[number - 1])
        before += len(piece)
    assert fired == ends[:1]
    assert not ends or ends[0] + 1 >= pattern_exit.fires_from
