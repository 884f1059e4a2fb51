"""Calibration closes a finished thought where the controller closes a live one."""

from exit_streams import BREAKS, COMMA, DOT, LINE, NEWLINE, PARAGRAPH, PLAIN, config_of, row
from hypothesis import given
from hypothesis import strategies as st

from meridian_patch.calibrate.stops import eat_places, late, probe_places, reached, rpdi_places
from meridian_patch.exit.controller import ExitController

TOKENS = st.sampled_from([PLAIN] * 6 + [COMMA, DOT, LINE, PARAGRAPH, NEWLINE])
ENTROPIES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, float("nan")])
THOUGHTS = st.lists(st.tuples(TOKENS, ENTROPIES), min_size=1, max_size=120)
DELTAS = (1e-3, 0.01, 0.1, 0.5, 8.0)
LAMBDAS = (3.0, 2.0, 1.5, 1.2, 1.05)
BOUNDS = {
    "min_think_tokens": st.sampled_from([0, 7, 40]),
    "grace_tokens": st.sampled_from([0, 3, 20]),
}


def live(thought, config, probe_entropies):
    """Where a live thought is closed, or None; a probe is answered before the next token comes."""
    controller = ExitController(config, BREAKS)
    controller.start()
    tokens, entropies = zip(*thought, strict=True)
    for token_id, entropy in zip(tokens, entropies, strict=True):
        action = controller.accept([token_id], [row(entropy)])
        if action and action.probe:
            action = controller.probed(action.probe, probe_entropies[action.probe.think_tokens])
        if action and action.close:
            return action.close.close_at if action.close.close_at < len(tokens) else None
    return None


def first(places, threshold, *, fires_below):
    return next((p.close_at for p in reached(places, [threshold], fires_below=fires_below)), None)


@given(thought=THOUGHTS, bounds=st.fixed_dictionaries(BOUNDS), gap=st.sampled_from([1, 4]))
def test_eat_closes_where_the_controller_does(thought, bounds, gap):
    """For every threshold, with warm-up, gate, floor and grace."""
    tokens = [token_id for token_id, _ in thought]
    probed = {n: thought[-n % len(thought)][1] for n in range(1, len(thought) + 1)}
    config = config_of(
        eat=True,
        eat_warmup_probes=2,
        eat_max_entropy_nats=1.5,
        probe_min_gap_tokens=gap,
        probe_max_gap_tokens=3 * gap,
        **bounds,
    )
    probes = [(at, probed[at]) for at in probe_places(tokens, config, BREAKS)]
    places = eat_places(tokens, probes, config, BREAKS)
    for delta in DELTAS:
        expected = live(thought, config.model_copy(update={"eat_delta": delta}), probed)
        assert first(places, delta, fires_below=True) == expected


@given(thought=THOUGHTS, bounds=st.fixed_dictionaries(BOUNDS), window=st.sampled_from([1, 5, 20]))
def test_rpdi_closes_where_the_controller_does(thought, bounds, window):
    """For every threshold."""
    tokens, entropies = (list(column) for column in zip(*thought, strict=True))
    config = config_of(rpdi=True, rpdi_window_tokens=window, **bounds)
    places = rpdi_places(tokens, entropies, config, BREAKS)
    for threshold in LAMBDAS:
        expected = live(thought, config.model_copy(update={"rpdi_lambda": threshold}), {})
        assert first(places, threshold, fires_below=False) == expected


@given(thought=THOUGHTS)
def test_no_ending_is_lost_by_leaving_places_out(thought):
    """What is kept for all thresholds holds the first place of each."""
    tokens, entropies = (list(column) for column in zip(*thought, strict=True))
    places = rpdi_places(tokens, entropies, config_of(rpdi=True, rpdi_window_tokens=3), BREAKS)
    kept = reached(places, LAMBDAS, fires_below=False)
    assert len({place.value for place in kept}) <= len(LAMBDAS)
    for threshold in LAMBDAS:
        alone = first(places, threshold, fires_below=False)
        assert first(kept, threshold, fires_below=False) == alone


@given(thought=THOUGHTS, lag=st.integers(0, 3))
def test_a_late_close_is_so_many_tokens_on_or_none(thought, lag):
    """A thought that ends by itself before that has no place there."""
    tokens, entropies = (list(column) for column in zip(*thought, strict=True))
    places = rpdi_places(tokens, entropies, config_of(rpdi=True, rpdi_window_tokens=3), BREAKS)
    moved = late(places, lag, len(tokens))
    assert [p.close_at - lag for p in moved] == [
        p.close_at for p in places if p.close_at + lag < len(tokens)
    ]
