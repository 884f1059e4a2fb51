"""The online step-time model recovers a roofline, forgets, and survives nonsense."""

import random

import pytest
from rooflines import random_shape, roofline, trained

from meridian_patch.policy.step_time import LinearFit, StepShape, StepTimeModel


def error(model: StepTimeModel, shape: StepShape, speed: float = 1.0) -> float:
    return abs(model.seconds(shape) / roofline(shape, speed) - 1)


def linear_s(tokens: int) -> float:
    """Seconds of a step that decodes, on a machine where nothing but tokens counts."""
    return 0.01 + 5e-4 * tokens


def test_a_roofline_is_recovered():
    """Decode-only steps and large prefills are predicted within 10 % on shapes never seen."""
    model, rng = trained(), random.Random(1)
    for prefill in (0, 400, 1500):
        shapes = [random_shape(rng, prefill) for _ in range(20)]
        assert max(error(model, shape) for shape in shapes) < 0.1


def test_nothing_is_predicted_before_there_is_data():
    """None, not a guess; one kind of step tells nothing of the other."""
    model = StepTimeModel()
    shape = StepShape(100, 10, 1000)
    assert model.seconds(shape) is None
    assert model.prefill_room(shape, 0.02, 0) is None
    for _ in range(20):
        model.observe(StepShape(0, 10, 1000), 0.01)
    assert model.decode_seconds(shape) == pytest.approx(0.01, rel=0.01)
    assert model.prefill_room(shape, 0.02, 0) is None


def test_prefill_within_a_time_keeps_it():
    """As many tokens as fit, less of them the further a prompt got."""
    model = trained()
    shape = StepShape(0, 30, 50_000)
    near, far = (model.prefill_room(shape, 0.02, before).in_time for before in (0, 8000))
    assert near > far > 0
    for tokens, before in ((near, 0), (far, 8000)):
        attended = tokens * before + tokens * (tokens + 1) // 2
        full = shape._replace(prefill_tokens=tokens, attended_tokens=attended)
        assert roofline(full) == pytest.approx(0.02, rel=0.1)
    assert model.prefill_room(shape, 1e-4, 0).in_time == 0


def test_a_time_without_end_has_room_for_a_finite_number_of_tokens():
    """A request may ask for such a latency; nothing is attended to here."""
    model = StepTimeModel()
    for tokens in range(20):
        model.observe(StepShape(0, tokens, 0), linear_s(tokens))
        model.observe(StepShape(50 * tokens + 50, tokens, 0), linear_s(51 * tokens + 50))
    assert model.prefill_room(StepShape(0, 3, 0), 0.1, 0).in_time < 1000
    assert model.prefill_room(StepShape(0, 3, 0), 1e306, 0).in_time > 10**9


def test_prefill_that_hides_behind_decoding_may_come_in_any_amount():
    """No fixed cost, no least amount."""
    assert trained().prefill_room(StepShape(0, 30, 50_000), 0.02, 0).worthwhile == 0


def test_long_chunks_alone_do_not_tell_of_a_fixed_time():
    """As after long prompts alone in an engine: all chunks had the engine's whole budget."""
    rng, model = random.Random(0), StepTimeModel()
    for _ in range(60):
        shape = random_shape(rng, 0)
        model.observe(shape, roofline(shape))
    for before in range(0, 64_000, 8192):
        attended = 8192 * before + 8192 * 8193 // 2
        shape = StepShape(8192, rng.randrange(1, 20), 60_000 + before, attended)
        model.observe(shape, roofline(shape))
    shape = StepShape(0, 10, 60_000)
    decode_s = model.decode_seconds(shape)
    room = model.prefill_room(shape, 1.2 * decode_s, 0)
    assert room.worthwhile == 0
    assert model.bare_seconds(shape) <= decode_s
    full = shape._replace(prefill_tokens=room.in_time, attended_tokens=room.in_time**2 // 2)
    assert 0 < roofline(full) < 1.5 * decode_s


def test_probes_are_told_from_decoding_and_from_prefill():
    """Steps with probes take longer by a fixed time: the others are predicted as they are."""
    rng, model = random.Random(0), StepTimeModel()
    for number in range(400):
        shape = random_shape(rng, 0)
        if number % 3:
            shape = shape._replace(probe_tokens=rng.randrange(20, 60))
        assert model.observe(shape, roofline(shape) + 2e-3 * bool(shape.probe_tokens))
    shape = StepShape(0, 50, 50_000)
    assert error(model, shape) < 0.1
    probed = shape._replace(probe_tokens=40)
    assert model.seconds(probed) == pytest.approx(roofline(shape) + 2e-3, rel=0.1)
    assert model.bare_seconds(shape) is None


def test_a_young_fit_that_blames_the_context_makes_no_chunk_worthwhile():
    """Long prompts that were computed alone: their time was put down to the pool's fill."""
    model = trained()
    model._prefill.coefficients = (0.0, 3.4e-5, 4.4e-6, 4.9e-10, 0.0)
    assert model.prefill_room(StepShape(0, 3, 66_000), 0.012, 0).worthwhile == 0


def test_prefill_that_costs_a_fixed_time_is_to_be_worth_it():
    """1 ms for any, 20 us per token: in 128 tokens one takes little more than in 256."""
    model, rng = StepTimeModel(), random.Random(4)
    for _ in range(500):
        prefill, rows = rng.choice((0, 0, 64, 128, 256)), rng.randrange(1, 40)
        seconds = 2e-3 + 2e-5 * (prefill + rows) + (1e-3 if prefill else 0.0)
        model.observe(StepShape(prefill, rows, 0), seconds)
    room = model.prefill_room(StepShape(0, 20, 0), 3e-3, 0)
    assert room.in_time == 0
    assert room.worthwhile == 128


def test_attention_within_a_chunk_counts():
    """A long chunk costs more than its tokens alone."""
    model = trained()
    whole_s = model.prefill_seconds(20_000)
    assert whole_s == pytest.approx(20_000 * 3e-5 + 20_000**2 / 2 * 1e-9, rel=0.1)


def test_a_fit_that_is_far_too_high_comes_down():
    """Prefill that was predicted to show and does not is learnt from, or nothing ever would be."""
    model, shape = StepTimeModel(), StepShape(64, 30, 50_000, 64 * 32)
    for _ in range(8):
        model.observe(StepShape(0, 30, 50_000), roofline(shape))
        model.observe(shape, 0.05)
    assert model.seconds(shape) > 4 * roofline(shape)
    for _ in range(600):
        model.observe(shape, roofline(shape))
    assert model.seconds(shape) == pytest.approx(roofline(shape), rel=0.1)


def test_outliers_and_nonsense_hardly_move_it():
    """A hundred stalls of a second, zeros and infinities among a thousand steps."""
    rng, model = random.Random(2), trained()
    for step in range(1000):
        shape = random_shape(rng)
        seconds = 1.0 if step % 10 == 0 else roofline(shape)
        model.observe(shape, seconds)
        model.observe(shape, rng.choice((0.0, -1.0, float("inf"), float("nan"))))
    assert error(model, StepShape(0, 50, 50_000)) < 0.2
    assert error(model, StepShape(1000, 50, 50_000)) < 0.2


def test_many_steps_of_one_shape_first_do_not_set_what_other_shapes_take():
    """A fit of one shape is wrong on others; steps of those mend it, and are no outliers."""
    model = StepTimeModel()
    for _ in range(6):
        model.observe(StepShape(0, 1, 16), linear_s(1))
    assert model.decode_seconds(StepShape(0, 7, 144)) > 1.5 * linear_s(7)
    for step in range(24):
        tokens, context = ((7, 144), (2, 96), (7, 175))[step % 3]
        model.observe(StepShape(0, tokens, context), linear_s(tokens))
    for tokens, context in ((1, 48), (2, 192), (7, 192), (12, 300)):
        guess_s = model.decode_seconds(StepShape(0, tokens, context))
        assert guess_s == pytest.approx(linear_s(tokens), rel=0.05)


def test_what_steps_of_one_shape_take_is_laid_to_the_step():
    """A request that ran alone for long: the first steps of several are not thought far longer."""
    model = StepTimeModel()
    for _ in range(130):
        model.observe(StepShape(0, 1, 127), linear_s(1))
    for tokens, context in ((3, 640), (5, 1024)):
        assert model.decode_seconds(StepShape(0, tokens, context)) < 2 * linear_s(tokens)


@pytest.mark.parametrize("stalled", [(0,), (3,), (1, 3), (0, 5, 6)])
def test_stalls_among_the_first_steps_are_outliers_too(stalled: tuple[int, ...]):
    """Of 16 steps, and also when a stall is in the very first fit."""
    model = StepTimeModel()
    for step in range(16):
        tokens = 1 + step % 2
        seconds = 0.3 if step in stalled else linear_s(tokens)
        model.observe(StepShape(0, tokens, 64 * tokens), seconds)
    for tokens in (1, 2, 11):
        guess_s = model.decode_seconds(StepShape(0, tokens, 64 * tokens))
        assert guess_s == pytest.approx(linear_s(tokens), rel=0.25)


def test_a_machine_that_slowed_down_is_followed():
    """After some thousand steps at half the speed the old data is forgotten."""
    rng, model = random.Random(3), trained()
    for _ in range(3000):
        shape = random_shape(rng)
        model.observe(shape, roofline(shape, 2.0))
    assert error(model, StepShape(0, 50, 50_000), 2.0) < 0.1


def test_coefficients_are_never_negative():
    """Falling data gives a flat line, not one that promises steps in no time."""
    fit = LinearFit(2)
    for tokens in range(1, 40):
        fit.add((1.0, float(tokens)), 1.0 - tokens / 100)
    assert min(fit.coefficients) >= 0
    assert fit.predict((1.0, 1000.0)) > 0


def test_no_step_pays_for_a_whole_fit(monkeypatch):
    """Rounds of a fit with many stalls are spread over steps; it is as good in the end."""
    solve, rounds = LinearFit._solve, []
    monkeypatch.setattr(LinearFit, "_solve", lambda *args: rounds.append(1) or solve(*args))
    fit, rng, most = LinearFit(2), random.Random(5), 0
    for _ in range(400):
        rounds.clear()
        tokens = rng.randrange(1, 100)
        fit.add((1.0, float(tokens)), linear_s(tokens) + (rng.random() < 0.1) * rng.random())
        most = max(most, len(rounds))
    # A round of its own when a coefficient would be negative.
    assert 0 < most <= 4
    assert fit.predict((1.0, 50.0)) == pytest.approx(linear_s(50), rel=0.1)


def test_where_a_token_seems_to_take_no_time_a_launched_chunk_is_one_that_was_in_time():
    """Not the largest chunk, which took 0.25 s once, and none in less than a launch takes."""
    model, shape = StepTimeModel(), StepShape(0, 8, 4000)
    model.graph_tokens = 256

    def take(tokens: int, seconds: float) -> None:
        model.observe(shape, 0.005)
        model.observe(StepShape(tokens, 8, 4000, tokens * (tokens + 1) // 2), seconds)

    for tokens, seconds in [(248, 0.017)] * 20 + [(8000, 0.25), (500, 0.026), (976, 0.027)] * 3:
        take(tokens, seconds)
    model._prefill.coefficients = (0.017, 0.0, 0.0, 0.0, 0.0095)
    rooms = [model.prefill_room(shape, each, 4000) for each in (0.004, 0.02, 0.03, 0.04, 0.3)]
    assert [room.in_time for room in rooms] == [0, 248, 976, 976, 8000]
