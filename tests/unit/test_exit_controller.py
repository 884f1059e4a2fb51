"""The exit controller: floor, grace, bounds, modes, probes, re-entry, late tokens."""

import math

import pytest
from exit_streams import BREAKS, LINE, PARAGRAPH, PLAIN, config_of, row, rows_of

from meridian_patch.exit.actions import Obstacle, Outcome, Probe
from meridian_patch.exit.controller import ExitController, follow
from meridian_patch.exit.strategies.base import NO_SIGNALS
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.tracker import PhaseTracker

END_PROBABILITY = {"end_probability": True, "end_probability_patience": 1}
CALM, SURE = row(), row(end_prob=0.9)


def controller_of(budget=None, think_tokens=0, **values):
    controller = ExitController(config_of(**values), BREAKS, budget)
    controller.start(think_tokens)
    return controller


def closes(controller, tokens, rows=None):
    """All closes that are asked for, one token at a time."""
    rows = rows or [CALM] * len(tokens)
    actions = [controller.accept([t], [r]) for t, r in zip(tokens, rows, strict=True)]
    return [action.close for action in actions if action and action.close]


def test_nothing_is_due_in_a_calm_thought():
    """No strategy fires, nothing is asked for, and the thought ends by itself."""
    controller = controller_of(rpdi=True, **END_PROBABILITY)
    assert not closes(controller, [PLAIN, LINE] * 200)
    too_soon = {"rpdi": Obstacle.WARM_UP}
    assert controller.end(1) == Outcome("natural", 401, None, 0, too_soon=too_soon)
    assert controller.thought is None


def test_close_waits_for_the_end_of_the_line():
    """The reason and the place are those of the firing, the close is at the line's end."""
    controller = controller_of(grace_tokens=5, **END_PROBABILITY)
    (close,) = closes(controller, [PLAIN, PLAIN, PLAIN, LINE, LINE], [CALM, SURE, *[CALM] * 3])
    assert (close.reason, close.fired_at, close.close_at) == ("end_probability", 2, 4)


def test_close_waits_no_longer_than_the_grace():
    """In the middle of a line when there is no end in sight; at once without a grace."""
    for grace, close_at in ((5, 7), (0, 2)):
        controller = controller_of(grace_tokens=grace, **END_PROBABILITY)
        (close,) = closes(controller, [PLAIN] * 20, [CALM, SURE] + [CALM] * 18)
        assert (close.fired_at, close.close_at) == (2, close_at)


def test_no_close_below_the_floor():
    """A strategy that stays sure fires at the floor."""
    controller = controller_of(min_think_tokens=10, **END_PROBABILITY)
    (close,) = closes(controller, [PLAIN] * 20, [SURE] * 20)
    assert close.close_at == 10


@pytest.mark.parametrize(
    ("tokens", "close_at"), [([PLAIN] * 200, 80), ([PLAIN] * 72 + [LINE] * 9, 73)]
)
def test_hard_cap_holds(tokens, close_at):
    """The wait for a line's end lies before the bound: an eighth of it, at most the grace."""
    controller = controller_of(max_think_tokens=80, grace_tokens=64)
    (close,) = closes(controller, tokens)
    assert (close.reason, close.fired_at, close.close_at) == ("hard_cap", 70, close_at)


def test_budget_is_an_upper_bound_for_all():
    """Neither the floor nor the grace reaches over vLLM's budget."""
    controller = controller_of(budget=30, min_think_tokens=100, grace_tokens=64)
    (close,) = closes(controller, [PLAIN] * 50)
    assert (close.reason, close.close_at) == ("budget", 30)
    controller = controller_of(budget=30, grace_tokens=64, **END_PROBABILITY)
    (close,) = closes(controller, [PLAIN] * 50, [CALM] * 20 + [SURE] + [CALM] * 29)
    assert (close.reason, close.close_at) == ("end_probability", 30)


def test_a_thought_that_the_prompt_began_counts_from_there():
    """Its tokens count for the bounds; they were not measured."""
    controller = controller_of(think_tokens=75, max_think_tokens=80)
    (close,) = closes(controller, [PLAIN] * 9)
    assert close.close_at == 80
    controller = controller_of(think_tokens=90, max_think_tokens=80)
    assert closes(controller, [PLAIN] * 9)[0].close_at == 91


def test_no_token_is_nothing_to_look_at():
    """The start marker may be the last token of a step, whatever is due by then."""
    controller = controller_of(budget=0)
    assert controller.accept([], []) is None
    assert controller.accept([PLAIN], [CALM]).close.reason == "budget"


def test_a_token_without_its_row_is_an_error():
    """Signals of other tokens would be taken for its own."""
    with pytest.raises(ValueError, match="1 rows of signals for 2 tokens"):
        controller_of(max_think_tokens=2).accept([PLAIN, LINE], [CALM])


def test_one_close_per_thought():
    """Behind the verdict and behind the boundary nothing is asked for, until the next thought."""
    controller = controller_of(max_think_tokens=5)
    assert len(closes(controller, [PLAIN] * 50)) == 1
    controller.closing()
    assert controller.end(1).reason == "hard_cap"
    assert not closes(controller, [PLAIN] * 50)
    assert controller.end(1) is None
    controller.start(earlier_tokens=51)
    assert len(closes(controller, [PLAIN] * 50)) == 1


def test_a_bound_holds_over_all_thoughts():
    """A thought that opens again has what the earlier ones left, then none."""
    controller = ExitController(config_of(max_think_tokens=20, min_think_tokens=15), BREAKS)
    for earlier_tokens, close_at in ((0, 20), (13, 7), (19, 1), (20, 1), (40, 1)):
        controller.start(earlier_tokens=earlier_tokens)
        (close,) = closes(controller, [PLAIN] * 50)
        assert (close.reason, close.close_at) == ("hard_cap", close_at)


@pytest.mark.parametrize(("mode", "asked"), [("off", 0), ("observe", 0), ("enforce", 1)])
def test_modes(mode, asked):
    """Observing keeps the verdict and asks for no close; off keeps nothing."""
    controller = controller_of(mode=mode, max_think_tokens=5)
    assert len(closes(controller, [PLAIN] * 50)) == asked
    outcome = controller.end(1)
    if mode == "off":
        assert outcome is None
    else:
        assert (outcome.reason, outcome.think_tokens) == ("natural", 51)
        assert outcome.verdict.reason == "hard_cap"


def test_reason_of_an_end_that_was_not_forced():
    """Natural though a close was asked for; by vLLM's budget when the thought is beyond it."""
    controller = controller_of(max_think_tokens=5)
    closes(controller, [PLAIN] * 6)
    assert controller.end(1).reason == "natural"
    for tokens, reason in ((29, "natural"), (30, "budget")):
        controller = controller_of(budget=30, mode="observe")
        closes(controller, [PLAIN] * tokens)
        assert controller.end(1).reason is reason


@pytest.mark.parametrize(("given", "tokens"), [(0, 30), (1, 29), (30, 0), (40, 0)])
def test_the_budget_counts_what_the_prompt_has_of_the_thought(given, tokens):
    """As vLLM does, from the start marker on; a thought behind it has a budget of its own."""
    for shorter, reason in ((0, "budget"), (1, "natural")):
        if shorter > tokens:
            continue
        controller = ExitController(config_of(mode="observe"), BREAKS, 30)
        controller.start(given_tokens=given)
        closes(controller, [PLAIN] * (tokens - shorter))
        assert controller.end(1).reason == reason
        controller.start()
        closes(controller, [PLAIN] * 29)
        assert controller.end(1).reason == "natural"


def test_a_request_may_end_in_its_thought():
    """Whatever was asked for by then, nothing answered it."""
    controller = controller_of(max_think_tokens=5)
    closes(controller, [PLAIN] * 6)
    controller.closing()
    outcome = controller.end(0, is_answered=False)
    assert (outcome.reason, outcome.think_tokens) == ("unanswered", 6)
    assert outcome.verdict.reason == "hard_cap"


def test_signals_that_are_missing_are_counted():
    """NaN closes nothing; the caps, which need no signal, still do."""
    controller = controller_of(rpdi=True, rpdi_window_tokens=2, **END_PROBABILITY)
    assert not closes(controller, [LINE, PLAIN] * 50, [NO_SIGNALS] * 100)
    assert controller.end(1).num_invalid == 100
    controller = controller_of(max_think_tokens=40)
    assert closes(controller, [PLAIN] * 50, [NO_SIGNALS] * 50)[0].close_at == 40


def eat_controller(**values):
    eat = {"eat": True, "eat_warmup_probes": 2, "probe_min_gap_tokens": 2}
    return controller_of(**(eat | values))


def test_probes_are_due_at_paragraphs():
    """With the thought and the place, and in mode observe too; without EAT none is."""
    for values in ({}, {"mode": "observe"}):
        controller = eat_controller(**values)
        assert controller.accept([PLAIN, PARAGRAPH], [CALM] * 2).probe == Probe(1, 2)
        controller.end(0)
        controller.start()
        action = controller.accept([PARAGRAPH, PLAIN, PARAGRAPH, PLAIN], [CALM] * 4)
        assert (action.probe, action.close) == (Probe(2, 3), None)
    assert controller_of(max_think_tokens=99).accept([PARAGRAPH] * 9, [CALM] * 9) is None


def test_eat_closes_at_the_end_of_the_line():
    """A result that comes late fires where the thought is by then."""
    controller = eat_controller(grace_tokens=50)
    for place in (2, 4):
        assert controller.probed(Probe(1, place), 0.1) is None
    assert not closes(controller, [PLAIN] * 6)
    assert controller.probed(Probe(1, 6), 0.1) is None
    (close,) = closes(controller, [PLAIN, LINE])
    assert (close.reason, close.fired_at, close.close_at) == ("eat", 6, 8)


def test_eat_closes_at_once_behind_a_line():
    """The line's end was the last token when the result came."""
    controller = eat_controller(grace_tokens=50)
    controller.accept([PLAIN, LINE], [CALM] * 2)
    actions = [controller.probed(Probe(1, place), 0.1) for place in (1, 2, 3)]
    assert actions[:2] == [None, None]
    assert actions[2].close[:3] == ("eat", 2, 2)


def test_a_token_before_the_result_fires_first():
    """Though it was not looked at when the probe's result came."""
    controller = eat_controller(grace_tokens=50, **END_PROBABILITY)
    controller.accept([PLAIN, PLAIN, PLAIN], [CALM, SURE, CALM])
    for place in (1, 2, 3):
        assert controller.probed(Probe(1, place), 0.1) is None
    (close,) = closes(controller, [LINE])
    assert (close.reason, close.fired_at) == ("end_probability", 2)


def test_stale_probe_results_are_dropped():
    """Of another thought, twice, out of order, or behind the boundary."""
    controller = eat_controller()
    controller.accept([PLAIN], [CALM])
    results = [Probe(2, 9), Probe(1, 5), Probe(1, 5), Probe(1, 4), Probe(1, 6)]
    assert [controller.probed(probe, 0.1) for probe in results] == [None] * 5
    assert controller.probed(Probe(1, 7), 0.1).close
    controller.end(1)
    assert controller.probed(Probe(1, 8), 0.1) is None


def test_eat_waits_for_the_floor():
    """Probes below it warm the strategy up and close nothing; NaN does neither."""
    controller = eat_controller(min_think_tokens=10)
    controller.accept([PLAIN] * 9, [CALM] * 9)
    assert [controller.probed(Probe(1, place), 0.1) for place in range(6)] == [None] * 6
    controller.accept([PLAIN], [CALM])
    assert controller.probed(Probe(1, 10), math.nan) is None
    assert controller.probed(Probe(1, 11), 0.1).close.close_at == 10
    assert controller.end(1).num_invalid == 1


def test_few_tokens_are_stored_below_the_floor():
    """A request may set any floor: a whole thought at once would hold up all others."""
    controller = controller_of(min_think_tokens=10**6, loop=True)
    for _ in range(1000):
        assert controller.accept([PLAIN], [CALM]) is None
        assert len(controller.thought._tokens) < 128
        assert controller.thought.fast_path_tokens <= 128


def test_tracker_and_controller_together():
    """Prompt, spec-decoded boundary with answer tokens, and a second thought."""
    start, end = 101, 102
    tracker = PhaseTracker(Boundaries("test", ((start,),), ((end,),), (end,)))
    known = [7, start]
    tracker.add("r", known)
    controller = ExitController(config_of(max_think_tokens=17), BREAKS)

    def step(*tokens):
        seen = len(known)
        tracker.runs("r")
        tracker.expects([tokens], {"r": 0})
        known.extend(tokens)
        tracker.observe("r", seen)
        return follow(controller, tracker.get("r"), seen, rows_of([1.0] * len(tokens)))

    assert step(*[PLAIN] * 6) is None
    assert step(PLAIN, PLAIN, end, PLAIN) is None
    assert controller.outcome == Outcome("natural", 9, None, 0)
    assert step(*[PLAIN] * 20) is None
    assert step(PLAIN, start, PLAIN, PLAIN) is None
    # Both thoughts together have as many tokens as the bound; a third one has none.
    assert step(*[PLAIN] * 6).close.close_at == 8
    assert step(end, start, *[PLAIN] * 8).close.close_at == 1
    assert controller.thought is not None
    tracker.remove("r")


@pytest.mark.parametrize(
    ("tokens", "results", "expected"),
    [
        (10, 0, dict.fromkeys(("eat", "rpdi"), Obstacle.FLOOR)),
        (30, 3, {"eat": Obstacle.WARM_UP, "rpdi": Obstacle.WARM_UP}),
        (90, 3, {"eat": Obstacle.NOT_PROBED}),
        (90, 9, {}),
    ],
)
def test_what_an_end_comes_too_soon_for(tokens, results, expected):
    """Below the floor all strategies; EAT before its warm-up, or without results; RPDI's window."""
    controller = controller_of(
        eat=True,
        eat_warmup_probes=4,
        eat_delta=1e-12,
        rpdi=True,
        rpdi_window_tokens=20,
        rpdi_lambda=4.0,
        min_think_tokens=20,
        probe_min_gap_tokens=8,
        probe_max_gap_tokens=8,
    )
    probes = []
    for _ in range(tokens):
        action = controller.accept([PLAIN], [row(1.0)])
        if action and action.probe:
            probes.append(action.probe)
    for number, probe in enumerate(probes[-results:] if results else ()):
        controller.probed(probe, 1.0 + number % 2)
    assert controller.thought.too_soon() == expected
    assert controller.end(1).too_soon == expected
