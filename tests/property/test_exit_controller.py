"""What the exit controller never does, and that steps do not change what it decides."""

import math

from exit_streams import BREAKS, DOT, LINE, PARAGRAPH, PLAIN, config_of, row
from hypothesis import given
from hypothesis import strategies as st

from meridian_patch.exit.actions import Probe
from meridian_patch.exit.controller import ExitController
from meridian_patch.exit.strategies.base import NO_SIGNALS, Signals, ThoughtStart
from meridian_patch.exit.strategies.build import build_strategies

TOKEN = st.sampled_from([PLAIN, PLAIN, DOT, LINE, PARAGRAPH])
ROW = st.one_of(
    st.builds(row, st.floats(0, 5), st.sampled_from([0.0, 0.2, 0.8])), st.just(NO_SIGNALS)
)
PROBE = st.one_of(st.floats(0, 0.01), st.floats(0, 5), st.just(math.nan))
# A token with its signals, or the result of a probe.
EVENT = st.one_of(st.tuples(TOKEN, ROW), st.tuples(TOKEN, ROW), PROBE)
EVENTS = st.lists(EVENT, max_size=120)
CONFIG = st.builds(
    config_of,
    min_think_tokens=st.integers(0, 40),
    grace_tokens=st.integers(0, 12),
    max_think_tokens=st.one_of(st.none(), st.integers(40, 100)),
    eat=st.booleans(),
    eat_warmup_probes=st.integers(1, 3),
    eat_delta=st.sampled_from([1e-4, 0.1, 5.0]),
    probe_min_gap_tokens=st.integers(1, 6),
    probe_max_gap_tokens=st.integers(6, 20),
    rpdi=st.booleans(),
    rpdi_window_tokens=st.integers(1, 9),
    rpdi_lambda=st.floats(1.05, 3),
    end_probability=st.booleans(),
    loop=st.booleans(),
    loop_max_pattern_size=st.integers(2, 4),
    loop_min_pattern_size=st.integers(0, 2),
    loop_min_count=st.integers(2, 4),
    end_probability_patience=st.integers(1, 4),
)
BUDGET = st.one_of(st.none(), st.integers(0, 90))


def play(events, config, budget, sizes):
    """Play the events; tokens between two probe results come in steps of the given sizes.

    Returns:
        The controller, and each close with the tokens that were known when it was asked for.
    """
    controller = ExitController(config, BREAKS, budget)
    controller.start()
    step, asked, known, sizes = [], [], 0, iter(sizes)
    wanted = next(sizes, 1)

    def flush():
        nonlocal step, known
        known += len(step)
        tokens, rows = [token for token, _ in step], [row for _, row in step]
        step = []
        if tokens:
            note(controller.accept(tokens, rows))

    def note(action):
        if action and action.close:
            asked.append((action.close, known))

    for place, event in enumerate(events):
        if not isinstance(event, tuple):
            flush()
            note(controller.probed(Probe(1, place), event))
            continue
        step.append(event)
        if len(step) >= wanted:
            flush()
            wanted = next(sizes, 1)
    flush()
    return controller, asked


def eager(events, config, budget):
    """Reason and place of the close by the written rules, every token looked at by itself."""
    strategies = build_strategies(config, ThoughtStart(BREAKS, budget))
    bounds = [bound for bound in (config.max_think_tokens, budget) if bound is not None]
    most = min(bounds, default=math.inf)
    floor = min(config.min_think_tokens, most)
    fired, count, token = None, 0, None
    for event in events:
        if not isinstance(event, tuple):
            says = [(s.reason, s.probed(event)) for s in strategies]
        else:
            token, signals = event[0], Signals.of([event[1]])
            count += 1
            says = [(s.reason, s.accept([token], signals, 0)) for s in strategies]
        says = [reason for reason, said in says if said]
        if fired is None and says and count >= floor:
            fired = says[0], count
        if fired and (
            token in BREAKS.line
            or count >= max(fired[1], min(fired[1] + config.grace_tokens, most))
        ):
            return (*fired, count)
    return None


SIZES = st.lists(st.integers(1, 9), max_size=60)


@given(EVENTS, CONFIG, BUDGET, SIZES)
def test_decisions_are_those_of_the_written_rules(events, config, budget, sizes):
    """Tokens looked at in bulk, in steps of any size, give what one by one give."""
    controller, asked = play(events, config, budget, sizes)
    expected = eager(events, config, budget)
    assert [close[:3] for close, _ in asked] == ([expected] if expected else [])
    assert controller.end(1).verdict == (asked[0][0] if asked else None)


@given(EVENTS, CONFIG, BUDGET, SIZES)
def test_closes_keep_floor_and_bounds(events, config, budget, sizes):
    """Asked for once, not below the floor, and in the step in which a bound is reached."""
    _, asked = play(events, config, budget, sizes)
    bounds = [bound for bound in (config.max_think_tokens, budget) if bound is not None]
    most = min(bounds, default=math.inf)
    assert len(asked) <= 1
    for close, known in asked:
        assert min(config.min_think_tokens, most) <= close.fired_at <= close.close_at <= known
        assert close.close_at <= max(most, 1)
        assert close.close_at - close.fired_at <= config.grace_tokens
    num_tokens = sum(isinstance(event, tuple) for event in events)
    if num_tokens >= max(most, 1):
        assert asked


@given(st.lists(st.tuples(TOKEN, st.just(NO_SIGNALS)) | st.just(math.nan)), CONFIG, SIZES)
def test_nan_never_closes(events, config, sizes):
    """With strategies by signals alone, nothing but NaN asks for nothing, and is counted."""
    unbounded = config.model_copy(update={"max_think_tokens": None, "loop": False})
    controller, asked = play(events, unbounded, None, sizes)
    assert not asked
    if controller.thought._strategies:
        # Probe results at or before the last one's place are dropped, here none is.
        assert controller.end(1).num_invalid == len(events)


@given(EVENTS, CONFIG, st.lists(st.one_of(EVENT, st.just("end"), st.just("start")), max_size=60))
def test_nothing_is_asked_for_behind_the_boundary(events, config, more):
    """Neither closes nor probes, until a new thought starts; it closes at most once."""
    controller, _ = play(events, config, None, [])
    controller.end(1)
    asked_in_thought, is_thinking = 0, False
    for place, event in enumerate(more):
        if event == "start":
            controller.start()
            asked_in_thought, is_thinking = 0, True
            continue
        if event == "end":
            controller.end(1)
            is_thinking = False
            continue
        if isinstance(event, tuple):
            action = controller.accept([event[0]], [event[1]])
        else:
            action = controller.probed(Probe(controller.num_thoughts, place), event)
        assert is_thinking or action is None
        asked_in_thought += bool(action and action.close)
        assert asked_in_thought <= 1


@given(EVENTS, CONFIG, BUDGET, SIZES)
def test_observing_reaches_the_same_verdict(events, config, budget, sizes):
    """It asks for no close and keeps what enforcing would have asked for."""
    _, asked = play(events, config, budget, sizes)
    observer = config.model_copy(update={"mode": "observe"})
    controller, observed = play(events, observer, budget, sizes)
    assert not observed
    assert controller.end(1).verdict == (asked[0][0] if asked else None)
