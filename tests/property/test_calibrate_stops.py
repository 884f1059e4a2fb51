"""Calibration closes a finished thought where the controller closes a live one."""

from exit_streams import BREAKS, COMMA, DOT, LINE, NEWLINE, PARAGRAPH, PLAIN, config_of, row
from hypothesis import given
from hypothesis import strategies as st

from meridian_patch.calibrate.stops import (
    eat_close_points,
    probe_points,
    reached,
    rpdi_close_points,
)
from meridian_patch.exit.controller import ExitController
from meridian_patch.exit.lag import Lag

TOKENS = st.sampled_from([PLAIN] * 6 + [COMMA, DOT, LINE, PARAGRAPH, NEWLINE])
ENTROPIES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, float("nan")])
THOUGHTS = st.lists(st.tuples(TOKENS, ENTROPIES), min_size=1, max_size=120)
DELTAS = (1e-3, 0.01, 0.1, 0.5, 8.0)
LAMBDAS = (3.0, 2.0, 1.5, 1.2, 1.05)
BOUNDS = {
    "min_think_tokens": st.sampled_from([0, 7, 40]),
    "grace_tokens": st.sampled_from([0, 3, 20]),
}


LAGS = st.builds(
    Lag,
    batches_in_flight=st.integers(1, 4),
    stride_steps=st.integers(1, 3),
    block_tokens=st.integers(2, 9),
    probe_every_steps=st.integers(1, 4),
)


def live(thought, config, probe_entropies, lag, wait_steps=None):
    """How many tokens of a thought come before it is closed, or None, step by step.

    Before a step is scheduled, all outputs but those of the last ``batches_in_flight - 1`` steps
    are taken in: probes first, then the tokens.
    """
    controller = ExitController(config, BREAKS)
    controller.start()
    # By step: think tokens and probes in its output.
    outputs, probes, due, close, sampled = {}, {}, {}, None, 0
    step = -1
    # Until a token more would be the boundary.
    while sampled < len(thought) or outputs:
        step += 1
        done = step - lag.batches_in_flight
        action = None
        if done in probes:
            probe = probes.pop(done)
            action = controller.probed(probe, probe_entropies[probe.think_tokens])
            close = close or (action and action.close)
        if done in outputs:
            n = outputs.pop(done)
            token_id, entropy = thought[n - 1]
            action = controller.accept([token_id], [row(entropy)])
            close = close or (action and action.close)
            if action and action.probe:
                wait = wait_steps(action.probe.think_tokens) if wait_steps else 0
                due[step + wait] = action.probe
        # No two of a thought's are under way: gaps are longer than that takes.
        if step in due:
            probes[step] = due.pop(step)
        # A close is forced when nothing is on the way.
        if close and not outputs:
            return sampled if sampled < len(thought) else None
        if step % lag.stride_steps == 0 and not close and sampled < len(thought):
            sampled += 1
            outputs[step] = sampled
    return None


def first(points, threshold, *, fires_below):
    return next((p.close_at for p in reached(points, [threshold], fires_below=fires_below)), None)


@given(
    thought=THOUGHTS,
    bounds=st.fixed_dictionaries(BOUNDS),
    gap=st.sampled_from([16, 20]),
    lag=LAGS,
    prompt_tokens=st.integers(0, 8),
)
def test_eat_closes_where_the_controller_does(thought, bounds, gap, lag, prompt_tokens):
    """For every threshold and engine, with warm-up, gate, floor and grace."""
    tokens = [token_id for token_id, _ in thought]
    probed = {n: thought[-n % len(thought)][1] for n in range(1, len(thought) + 1)}
    config = config_of(
        eat=True,
        eat_warmup_probes=2,
        eat_max_entropy_nats=1.5,
        probe_min_gap_tokens=gap,
        probe_max_gap_tokens=gap + 5,
        **bounds,
    )

    def wait_steps(think_tokens):
        return lag.wait_steps(prompt_tokens + think_tokens, think_tokens % lag.probe_every_steps)

    probes = [(at, probed[at]) for at in probe_points(tokens, config, BREAKS)]
    points = eat_close_points(tokens, probes, config, BREAKS, lag, wait_steps)
    for delta in DELTAS:
        closing = config.model_copy(update={"eat_delta": delta})
        expected = live(thought, closing, probed, lag, wait_steps=wait_steps)
        assert first(points, delta, fires_below=True) == expected


@given(
    thought=THOUGHTS,
    bounds=st.fixed_dictionaries(BOUNDS),
    window=st.sampled_from([1, 5, 20]),
    lag=LAGS,
)
def test_rpdi_closes_where_the_controller_does(thought, bounds, window, lag):
    """For every threshold and engine."""
    tokens, entropies = (list(column) for column in zip(*thought, strict=True))
    config = config_of(rpdi=True, rpdi_window_tokens=window, **bounds)
    points = rpdi_close_points(tokens, entropies, config, BREAKS, lag)
    for threshold in LAMBDAS:
        closing = config.model_copy(update={"rpdi_lambda": threshold})
        assert first(points, threshold, fires_below=False) == live(thought, closing, {}, lag)


@given(thought=THOUGHTS)
def test_no_ending_is_lost_by_leaving_places_out(thought):
    """What is kept for all thresholds holds the first point of each."""
    tokens, entropies = (list(column) for column in zip(*thought, strict=True))
    config = config_of(rpdi=True, rpdi_window_tokens=3)
    points = rpdi_close_points(tokens, entropies, config, BREAKS, Lag())
    kept = reached(points, LAMBDAS, fires_below=False)
    assert len({point.value for point in kept}) <= len(LAMBDAS)
    for threshold in LAMBDAS:
        alone = first(points, threshold, fires_below=False)
        assert first(kept, threshold, fires_below=False) == alone
