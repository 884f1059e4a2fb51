"""Each strategy by itself: when it fires, and what it leaves out."""

import math
import random

import pytest
from exit_streams import BREAKS, COMMA, DOT, LINE, PLAIN, signals_of

from meridian_patch.exit.strategies.answer_reserve import thought_room
from meridian_patch.exit.strategies.base import NO_SIGNALS, Signals, Strategy
from meridian_patch.exit.strategies.eat import Eat
from meridian_patch.exit.strategies.end_probability import EndProbability
from meridian_patch.exit.strategies.hard_cap import Budget, HardCap
from meridian_patch.exit.strategies.loop import LoopBreaker
from meridian_patch.exit.strategies.rpdi import Rpdi

NAN = math.nan


def test_a_strategy_that_measures_nothing_never_fires():
    """The interface's own answers."""
    assert Strategy().accept([PLAIN], signals_of([1.0]), 0) is None
    assert Strategy().probed(0.0) is None


def test_rows_become_columns():
    """The device writes rows, strategies read columns."""
    signals = Signals.of([(1.0, 2.0, 0.3, 0.4), NO_SIGNALS])
    assert signals.entropy[0] == 1.0
    assert signals.end_prob[0] == 0.4
    assert all(math.isnan(column[1]) for column in signals)


def test_eat_fires_once_a_flat_series_is_warm():
    """Not in the warm-up, then at once: the variance is 0 from the first probe on."""
    eat = Eat(0.2, 1e-3, warmup_probes=4, max_entropy_nats=1.0)
    assert [eat.probed(0.3) is not None for _ in range(6)] == [False] * 4 + [True] * 2
    assert eat.reason == "eat"
    assert "below 1.00e-03" in eat.probed(0.3)


def test_eat_variance_by_hand():
    """x = 1, 2 with alpha 0.5: m = 1.5, v = 0.5 * 0.5^2, debiased by 1 - 0.5^2."""
    eat = Eat(0.5, 1e-9, warmup_probes=1, max_entropy_nats=None)
    assert eat.variance == math.inf
    eat.probed(1.0)
    eat.probed(2.0)
    assert eat.variance == pytest.approx(0.125 / 0.75)


def test_eat_needs_many_flat_probes_to_settle():
    """From a variance of 0.25 down to 1e-3: ln 250 / -ln(1 - alpha) of them."""
    for alpha, needed in ((0.2, 25), (0.1, 53)):
        eat = Eat(alpha, 1e-3, warmup_probes=1, max_entropy_nats=None)
        eat._biased_variance, eat._mean, eat.count = 0.25, 0.5, 1000
        probes = 1
        while eat.probed(0.5) is None:
            probes += 1
        assert probes == needed


def test_steadily_unsure_is_not_converged():
    """A flat series of high entropy fires only without the gate."""
    gated, open_ = (Eat(0.2, 1e-3, 2, gate) for gate in (1.0, None))
    assert not any(gated.probed(1.0) for _ in range(50))
    assert any(open_.probed(1.0) for _ in range(50))


def test_eat_leaves_nan_out():
    """Neither a firing nor a trace in the state."""
    eat = Eat(0.2, 1e-3, 1, None)
    eat.probed(0.3)
    assert eat.probed(NAN) is None
    assert eat.probed(math.inf) is None
    assert (eat.count, eat.variance) == (1, 0.0)


def test_rpdi_fires_at_a_sentence_end():
    """Calm, then unsure: the first sentence end after the quotient passed lambda."""
    rpdi = Rpdi(4, 2.0, BREAKS.sentence)
    entropies = [0.1] * 20 + [1.0] * 6
    tokens = [DOT] * 20 + [PLAIN, PLAIN, COMMA, PLAIN, DOT, DOT]
    firing = rpdi.accept(tokens, signals_of(entropies), 0)
    assert firing.at == 24
    assert "times the thought's, above 2.00" in firing.why


def test_rpdi_waits_for_what_it_may_fire_at():
    """Before ``first`` nothing counts, and what came before is not forgotten."""
    entropies, tokens = [0.1] * 20 + [1.0] * 6, [DOT] * 26
    assert Rpdi(4, 2.0, BREAKS.sentence).accept(tokens, signals_of(entropies), 0).at == 20
    assert Rpdi(4, 2.0, BREAKS.sentence).accept(tokens, signals_of(entropies), 25).at == 25
    assert Rpdi(4, 2.0, BREAKS.sentence).accept(tokens, signals_of(entropies), 26) is None


def test_rpdi_cannot_fire_before_lambda_windows():
    """The quotient is at most i / W: the published setting needs more than 1024 tokens."""
    rpdi = Rpdi(512, 2.0, BREAKS.sentence)
    entropies = [0.0] * 512 + [1.0] * 512
    assert rpdi.accept([DOT] * 1024, signals_of(entropies), 0) is None
    assert rpdi.ratio == 2.0
    entropies = [0.0] * 513 + [1.0] * 512
    assert Rpdi(512, 2.0, BREAKS.sentence).accept([DOT] * 1025, signals_of(entropies), 0).at == 1024


def test_rpdi_is_not_carried_over_lambda_by_rounding():
    """Seven tokens are 1.4 windows of five: the quotient is 1.4 there, and comes out above it."""
    entropies = [0.0] * 2 + [0.3] * 6
    one = Rpdi(5, 1.4, BREAKS.sentence)
    one.accept([PLAIN] * 7, signals_of(entropies[:7]), 0)
    assert one.ratio > 1.4
    assert Rpdi(5, 1.4, BREAKS.sentence).accept([DOT] * 8, signals_of(entropies), 0) is None


def test_rpdi_keeps_small_entropies_behind_large_ones():
    """A window that took away what leaves it would be left with rounding errors."""
    rpdi = Rpdi(8, 2.0, BREAKS.sentence)
    rpdi.accept([PLAIN] * 1000, signals_of([1e12] * 1000), 0)
    rpdi.accept([PLAIN] * 12, signals_of([1e-9] * 12), 0)
    assert rpdi.ratio == pytest.approx(1e-9 / (1e15 / 1012), rel=1e-12)


def test_rpdi_leaves_nan_out():
    """A sentence end without a signal fires nothing; all zero has no quotient."""
    rpdi = Rpdi(2, 1.5, BREAKS.sentence)
    tokens = [PLAIN] * 6 + [DOT, LINE]
    firing = rpdi.accept(tokens, signals_of([0.1] * 4 + [1.0, 1.0, NAN, 1.0]), 0)
    assert firing.at == 7
    zeros = Rpdi(2, 1.5, BREAKS.sentence)
    assert zeros.accept([DOT] * 9, signals_of([0.0] * 9), 0) is None
    assert zeros.ratio is None


def test_hard_cap_fires_early_enough():
    """At the bound, or as many tokens before it as there are to find a line's end."""
    assert HardCap(5).accept([PLAIN] * 9, signals_of([1.0] * 9), 0).at == 4
    assert HardCap(5, lead_tokens=2).accept([PLAIN] * 9, signals_of([1.0] * 9), 0).at == 2
    assert HardCap(5).accept([PLAIN] * 4, signals_of([1.0] * 4), 0) is None


def test_hard_cap_goes_on_firing():
    """What it could not say below the floor it says above it; earlier tokens count."""
    cap = Budget(5, think_tokens=3)
    assert cap.reason == "budget"
    assert cap.accept([PLAIN] * 3, signals_of([1.0] * 3), 3) is None
    firing = cap.accept([PLAIN] * 3, signals_of([1.0] * 3), 1)
    assert (firing.at, firing.why) == (1, "5 think tokens of at most 5")


def test_end_probability_counts_the_places():
    """They need not follow each other, and the token that fires is one of them."""
    end_probs = [0.6, 0.0, NAN, 0.5, 0.0, 0.9]
    signals, tokens = signals_of([1.0] * 6, end_probs), [PLAIN] * 6
    assert EndProbability(0.5, 1).accept(tokens, signals, 0).at == 0
    assert EndProbability(0.5, 2).accept(tokens, signals, 0).at == 3
    assert EndProbability(0.5, 2).accept(tokens, signals, 4).at == 5
    assert EndProbability(0.5, 4).accept(tokens, signals, 0) is None
    strategy = EndProbability(0.5, 3)
    strategy.accept(tokens[:4], signals_of([1.0] * 4, end_probs[:4]), 0)
    firing = strategy.accept(tokens[4:], signals_of([1.0] * 2, end_probs[4:]), 0)
    assert firing.at == 1
    assert "at least 0.500, 3 times" in firing.why


def test_the_loop_breaker_counts_whole_patterns():
    """Three times three tokens, behind others; it fires at the last of them, and once."""
    tokens = [9, 9, 8, *[1, 2, 3] * 3]
    breaker = LoopBreaker(4, 2, 3)
    assert breaker.reason == "loop"
    firing = breaker.accept([*tokens, 1, 2, 3], signals_of([1.0] * 15), 0)
    assert (firing.at, firing.why) == (len(tokens) - 1, "3 tokens stand there 3 times")
    assert breaker.accept([1, 2, 3], signals_of([1.0] * 3), 0) is None


def test_a_short_pattern_is_found_as_several_of_its_kind():
    """One token over and over is a pattern of eight, but not before there are three of these."""
    assert LoopBreaker(16, 8, 3).accept([5] * 23, signals_of([1.0] * 23), 0) is None
    assert LoopBreaker(16, 8, 3).accept([5] * 24, signals_of([1.0] * 24), 0).at == 23


def test_a_loop_below_the_floor_fires_at_it():
    """Where it still runs; one that is over does not."""
    running, over = [1, 2] * 20, [1, 2] * 10 + list(range(20))
    assert LoopBreaker(2, 2, 3).accept(running, signals_of([1.0] * 40), 30).at == 30
    assert LoopBreaker(2, 2, 3).accept(over, signals_of([1.0] * 40), 30) is None


class Compared(int):
    """A token that counts how often it is compared."""

    times = 0

    def __ne__(self, other):
        Compared.times += 1
        return int(self) != int(other)

    def __eq__(self, other):
        Compared.times += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("count", [2_000, 20_000])
def test_the_loop_breaker_costs_the_same_at_any_length(monkeypatch, count):
    """About ln(256 / 8) / 3 comparisons per token where nothing repeats; vLLM's check takes 249."""
    monkeypatch.setattr(Compared, "times", 0)
    rng = random.Random(7)
    tokens = [Compared(rng.randrange(1000)) for _ in range(count)]
    breaker = LoopBreaker(256, 8, 4)
    for begin in range(0, count, 5):
        assert breaker.accept(tokens[begin : begin + 5], signals_of([1.0] * 5), 0) is None
    assert 0.5 < Compared.times / count < 1.5


def test_the_loop_breaker_compares_no_token_often(monkeypatch):
    """Rows of one token, each a little too short to be a loop, are the worst there is."""
    monkeypatch.setattr(Compared, "times", 0)
    tokens = [Compared(token) for _ in range(40) for token in (*[0] * 63, 1 + _)]
    assert LoopBreaker(32, 16, 4).accept(tokens, signals_of([1.0] * len(tokens)), 0) is None
    assert Compared.times <= 2.1 * (32 - 16 + 1) * len(tokens)


def test_the_loop_breaker_compares_repetitions_in_parts(monkeypatch):
    """Below its floor a loop goes on for as long as the request likes."""
    single = []
    monkeypatch.setattr(Compared, "__ne__", lambda a, b: single.append(1) or int(a) != int(b))
    tokens = [Compared(5)] * 4000
    breaker = LoopBreaker(256, 200, 2)
    assert breaker.accept(tokens, signals_of([1.0] * 4000), 4000) is None
    assert len(single) <= 57 * 4000 / 40


@pytest.mark.parametrize(
    ("reserve", "max_tokens", "room"),
    [(50, 200, 147), (0.25, 200, 147), (0.301, 200, 136), (196, 200, 1)],
)
def test_a_reserve_leaves_the_rest_to_the_thought(reserve, max_tokens, room):
    """Tokens or a share, rounded up for the answer; three more for the close."""
    assert thought_room(reserve, max_tokens, 3) == room


@pytest.mark.parametrize("reserve", [197, 200, 10**6, 0.99])
def test_a_reserve_that_leaves_nothing_is_half(reserve):
    """What is left of it for the close is none of the answer's."""
    assert thought_room(reserve, 200, 3) == 97
    assert thought_room(reserve, 4, 3) == 0
