"""How much prefill rides with answers."""

import random

import pytest
from rooflines import random_shape, roofline, trained

from meridian_patch.config.policy import PolicyConfig
from meridian_patch.policy.chunk_rates import ChunkRates
from meridian_patch.policy.prefill_budget import (
    UNNOTICED_S,
    PrefillBudget,
    PrefillBudgetSettings,
    PromptRest,
)
from meridian_patch.policy.step_time import StepShape, StepTimeModel

FULL = 8192
SHAPE = StepShape(0, 30, 50_000)


def cut(model: StepTimeModel | None = None, **config) -> PrefillBudget:
    return PrefillBudget(
        PrefillBudgetSettings.of(PolicyConfig(**config), FULL), model or StepTimeModel()
    )


def prefilling(tokens: int) -> StepShape:
    return SHAPE._replace(prefill_tokens=tokens, attended_tokens=tokens * (tokens + 1) // 2)


def test_before_data_the_budget_feels_its_way():
    """Decoding alone, the least, then twice what did not show; at most a share of the budget."""
    model = StepTimeModel()
    one = cut(model)
    for _ in range(4):
        assert one.token_budget(SHAPE, 0, None, 0.0) == 30
        model.observe(SHAPE, roofline(SHAPE))
    default_s = one.default_itl_s(SHAPE)
    for hidden in (64, 128):
        shape = SHAPE._replace(prefill_tokens=hidden)
        model.observe(shape, roofline(shape))
        assert one.token_budget(SHAPE, 0, default_s, 0.0) == 30 + 2 * hidden
    model.observe(SHAPE._replace(prefill_tokens=3000), roofline(SHAPE))
    assert one.token_budget(SHAPE, 0, default_s, 0.0) == 30 + int(FULL / 2.5)


def test_a_backlog_from_the_start_does_not_hide_what_decoding_takes():
    """Every step has prefill, so some are made without it: first, and every so often."""
    model = StepTimeModel()
    one = cut(model)
    cuts = []
    for _ in range(400):
        tokens = one.token_budget(SHAPE, 0, one.default_itl_s(SHAPE), 0.0) - 30
        cuts.append(tokens)
        shape = prefilling(tokens)
        model.observe(shape, roofline(shape))
    assert cuts[:5] == [0, 0, 0, 0, 64]
    assert sum(tokens == 0 for tokens in cuts) == 4 + 3
    assert 0.85 < roofline(prefilling(cuts[-1])) / one.default_itl_s(SHAPE) < 1.1


def test_a_backlog_in_chunks_of_one_size_is_tried_with_a_larger_one():
    """10 ms for a step and 20 us per token: from chunks of 64 alone, tokens may take all of it."""

    def machine_s(shape: StepShape) -> float:
        return 0.01 + 20e-6 * (shape.prefill_tokens + shape.decode_tokens)

    # Two stages: every other step has no decodes.
    shapes = StepShape(0, 2, 300), StepShape(0, 0, 0)
    model, now_s, chunks = StepTimeModel(), 0.0, []
    one = cut(model, drain_s=0.05)
    for _ in range(8):
        model.observe(shapes[0], machine_s(shapes[0]))
    while now_s < 1.0:
        shape = shapes[len(chunks) % 2]
        tokens = one.token_budget(shape, 0, one.default_itl_s(shape), now_s)
        chunks.append(tokens - shape.decode_tokens)
        step = shape._replace(prefill_tokens=chunks[-1], attended_tokens=64 * 64 * len(chunks))
        now_s += machine_s(step)
        one.ran(0, is_used_up=True, now_s=now_s)
        model.observe(step, machine_s(step))
    assert chunks[:8] == [64] * 8
    assert max(chunks[:20]) >= 128
    # Prefill has half of the machine's time, as the saturation guard promises.
    assert chunks[-1] > 400


def test_a_large_piece_is_not_doubled():
    """Whole pieces of 2096 tokens, as of a hybrid model's blocks: prefill has half the step."""
    model = StepTimeModel()
    one = cut(model, drain_s=0.05)
    now_s, chunks = 0.0, []
    for _ in range(8):
        model.observe(SHAPE, 0.01)
    for _ in range(200):
        chunks.append(one.token_budget(SHAPE, 0, one.default_itl_s(SHAPE), now_s, 2096) - 30)
        step = SHAPE._replace(prefill_tokens=chunks[-1], attended_tokens=chunks[-1] ** 2 // 2)
        now_s += 0.01 + 40e-6 * chunks[-1]
        one.ran(0, is_used_up=True, now_s=now_s)
        model.observe(step, 0.01 + 40e-6 * chunks[-1])
    assert max(chunks[-100:]) == 2096


def test_a_step_that_cannot_be_without_prefill_is_not_asked_for_for_long():
    """Prefill in spite of the cut: the wish is given up until the next time."""
    model = StepTimeModel()
    wished = []
    for _ in range(300):
        wished.append(model.wants_decode_only(SHAPE))
        model.observe(prefilling(100), 0.01)
    assert wished[:9] == [True] * 8 + [False]
    assert sum(wished) == 3 * 8


def test_a_step_without_prefill_is_never_all_that_is_allowed():
    """No request decodes, or nothing comes back: prefill goes on."""
    assert cut().token_budget(StepShape(0, 0, 0), 0, None, 0.0) == 64
    one = cut()
    cuts = [one.token_budget(SHAPE, 0, None, 0.0) - 30 for _ in range(12)]
    assert cuts == [0] * 8 + [64] * 4


def test_with_data_the_step_keeps_the_target():
    """The default is up to step_cut_factor times the decode-only step; a target replaces it."""
    one = cut(trained())
    default_s = one.default_itl_s(SHAPE)
    assert 1.04 < default_s / roofline(SHAPE) < 1.21
    for target_s in (default_s, 0.05):
        tokens = one.token_budget(SHAPE, 0, target_s, 0.0) - 30
        assert 0.85 < roofline(prefilling(tokens)) / target_s < 1.1


def test_steps_are_no_longer_than_pays():
    """Prefill beside the reading of weights and KV needs little more; where the two add up, all."""
    beside, added = StepTimeModel(), StepTimeModel()
    rng = random.Random(1)
    for _ in range(400):
        shape = random_shape(rng)
        beside.observe(shape, roofline(shape))
        added.observe(shape, 6e-3 + 4e-8 * shape.context_tokens + 1e-4 * shape.prefill_tokens)
    busy = StepShape(0, 10, 400_000)
    assert cut(beside).default_itl_s(busy) / beside.decode_seconds(busy) == pytest.approx(1.05)
    assert cut(added).default_itl_s(busy) / added.decode_seconds(busy) == pytest.approx(1.2)


def test_some_prefill_is_always_allowed():
    """However tight the target, prompts go on."""
    assert cut(trained()).token_budget(SHAPE, 0, 1e-4, 0.0) == 30 + 64


def test_a_chunk_is_worth_its_fixed_cost():
    """Where any prefill takes a while, small chunks would take it many times."""
    model = StepTimeModel()
    for step in range(200):
        prefill = step % 3 * 100
        model.observe(StepShape(prefill, 30, 0), 2e-3 + 2e-5 * prefill + 1e-3 * bool(prefill))
    shape = StepShape(0, 30, 0)
    one = cut(model)
    assert 100 <= one.token_budget(shape, 0, one.default_itl_s(shape), 0.0) - 30 <= 200


def test_a_cut_that_does_not_drain_is_widened_and_comes_back():
    """Saturation guard: longer steps after drain_s, until prefill has half or something is left."""
    model, rng = StepTimeModel(), random.Random(1)
    for _ in range(400):
        shape = random_shape(rng)
        model.observe(shape, 6e-3 + 1e-5 * shape.prefill_tokens)
    one = cut(model, drain_s=5.0)

    def prefill(now_s: float) -> int:
        return one.token_budget(SHAPE, 0, 0.007, now_s) - 30

    before = prefill(0.0)
    one.ran(0, is_used_up=True, now_s=0.0)
    assert prefill(4.9) == before
    assert before < prefill(6.0) < prefill(7.0)
    assert 6e-3 + 1e-5 * prefill(1000.0) == pytest.approx(2 * 6e-3, rel=0.1)
    assert one.token_budget(SHAPE, 0, 0.05, 1000.0) == one.token_budget(SHAPE, 0, 0.05, 0.0)
    one.ran(0, is_used_up=False, now_s=1000.0)
    assert prefill(1000.0) == before


@pytest.mark.parametrize("cadence", [1, 8])
@pytest.mark.parametrize("tokens", [400, 4000, 32_000])
def test_a_lone_prompt_beside_answers_ends_in_bounded_time(tokens, cadence):
    """Where prefill adds to decoding, at any cadence: three times its time without a cut."""

    def machine_s(shape: StepShape) -> float:
        return 10e-3 + 30e-6 * shape.prefill_tokens + 1e-10 * shape.attended_tokens

    model, shape = StepTimeModel(), StepShape(0, 4, 8000)
    for step in range(400):
        chunk = (0, 100, 2000, 500)[step % 4]
        taught = shape._replace(prefill_tokens=chunk, attended_tokens=chunk * (chunk + 1) // 2)
        model.observe(taught, machine_s(taught))

    def seconds(budget) -> float:
        done, spent_s, step = 0, 0.0, 0
        while done < tokens:
            chunk = 0
            if step % cadence == 0:
                chunk = min(budget(done, spent_s), tokens - done)
            attended = chunk * (2 * done + chunk + 1) // 2
            spent_s += machine_s(shape._replace(prefill_tokens=chunk, attended_tokens=attended))
            done, step = done + chunk, step + 1
        return spent_s

    one = cut(model)

    def bounded(done: int, spent_s: float) -> int:
        owed = one.owed_tokens(shape, PromptRest(tokens, done, 0, spent_s), cadence)
        default_s = one.default_itl_s(shape)
        return one.token_budget(shape, done, default_s, 0.0, max(owed, 1)) - shape.decode_tokens

    assert seconds(bounded) <= 3 * seconds(lambda *_: FULL)


def test_nothing_is_owed_before_there_is_data_or_where_decoding_is_thought_to_take_no_time():
    """The latter as of a step of a pipeline in which no request is due."""
    known = cut(trained())
    known._model.decode_seconds = lambda _: 0.0
    for one in (cut(), known):
        assert one.owed_tokens(SHAPE, PromptRest(1000, 0, 0, 0.0), 1) == 0


def test_a_prompt_that_is_late_gets_half_of_the_time():
    """It would stall the answers with the whole budget: by 288 ms in a replay."""
    model = trained()
    owed = cut(model).owed_tokens(SHAPE, PromptRest(30_000, 8000, 0, 60.0), 1)
    attended = owed * (2 * 8000 + owed + 1) // 2
    step_s = roofline(SHAPE._replace(prefill_tokens=owed, attended_tokens=attended))
    assert 1.2 < step_s / roofline(SHAPE) < 2.2


def graphed() -> StepTimeModel:
    """10 ms for a step, 20 us per prompt token, and 15 ms for one of more than 256 tokens."""
    model = StepTimeModel()
    model.graph_tokens = 256
    for tokens in (0, 0, 0, 0, 64, 128, 600, 200, 1000, 0, 2000, 100, 400, 4000) * 4:
        launch_s = 0.015 if tokens + 30 > 256 else 0.0
        model.observe(prefilling(tokens), 0.01 + 2e-5 * (tokens + 30) + launch_s)
    return model


def test_a_cut_step_stays_within_the_captured_graph():
    """A little above it a step takes as long as with many more tokens."""
    one = cut(graphed(), min_prefill_tokens=64)
    for target_s in (0.012, 0.016, 0.02):
        assert 64 <= one.token_budget(SHAPE, 0, target_s, 0.0) - 30 <= 226
    assert one.token_budget(SHAPE, 0, 0.05, 0.0) > 1000


def test_a_backlog_that_does_not_drain_has_steps_well_above_the_graph():
    """Now and then, so that prefill has at most half of the time."""
    one = cut(graphed(), min_prefill_tokens=64)
    sizes, now_s = [], 0.0
    while now_s < 20.0:
        tokens = one.token_budget(SHAPE, 0, 0.011, now_s) - 30
        one.ran(tokens, is_used_up=True, now_s=now_s)
        sizes.append((now_s, tokens))
        launch_s = 0.015 if tokens + 30 > 256 else 0.0
        now_s += 0.01 + 2e-5 * (tokens + 30) + launch_s
    early = [tokens for at, tokens in sizes if at < 10.0]
    late = [tokens for at, tokens in sizes if at > 10.0]
    assert max(early) <= 226
    above = [tokens for tokens in late if tokens > 226]
    assert above
    assert min(above) > 500
    assert len(above) < 0.4 * len(late)


def test_a_piece_that_no_graph_has_room_for_comes_with_as_many_tokens_as_its_launch_takes():
    """A prompt that must be computed whole is not held back by the graph."""
    one = cut(graphed(), min_prefill_tokens=64)
    assert one.token_budget(SHAPE, 0, 0.012, 0.0, least=300) - 30 > 500
    full = StepShape(0, 256, 50_000)
    assert one.token_budget(full, 0, 0.012, 1.0) - 256 > 500


def test_a_graph_without_room_for_a_chunk_does_not_hold_prompts_up():
    """With `--max-num-seqs 8` the largest graph has 16 tokens: 9 at a time would take for ever."""
    model = graphed()
    model.graph_tokens = 39
    one = cut(model, min_prefill_tokens=64)
    budgets = []
    for place in range(40):
        budgets.append(one.token_budget(SHAPE, 0, 0.012, 0.01 * place, owed=200))
        one.ran(budgets[-1] - 30, is_used_up=True, now_s=0.01 * place)
    above = [budget for budget in budgets if budget > 39]
    assert min(above) - 30 >= 200
    assert 3 <= len(above) <= 20
    # In between, steps only decode: nine tokens are of no use.
    assert {budget for budget in budgets if budget <= 39} == {30}


def in_pieces() -> StepTimeModel:
    """As an H200 serves 8B: 6 ms to decode, with a prompt 17 ms in the graph, 25 ms above it."""
    model = StepTimeModel()
    model.graph_tokens = 256
    for tokens in (0, 0, 0, 0, 64, 128, 600, 200, 1000, 0, 2000, 100, 400) * 6:
        least_s = 0.006 if not tokens else 0.017 if tokens + 30 <= 256 else 0.025
        model.observe(prefilling(tokens), max(least_s, 4e-3 + 2e-5 * (tokens + 30)))
    return model


def used(one: PrefillBudget, now_s: float) -> int:
    """Prefill tokens of a step of a backlog, all of which are used."""
    tokens = one.token_budget(SHAPE, 0, 0.0072, now_s) - 30
    one.ran(tokens, is_used_up=True, now_s=now_s)
    return tokens


def test_prompts_are_not_computed_in_pieces_that_each_take_long():
    """A piece that the graph has room for takes 50 us per token, one of 1,000 tokens 20 us."""
    one = cut(in_pieces(), min_prefill_tokens=64)
    budgets = [used(one, 0.006 * place) for place in range(100)]
    assert {0} < set(budgets)
    assert min(set(budgets) - {0}) > 500
    # A step of 25 ms every 38 ms at most.
    assert len([budget for budget in budgets if budget]) < 20


def test_where_no_chunk_is_in_time_a_step_is_as_long_as_hardly_a_reader_notices():
    """Step after step, with no pause; who asked for a latency gets one that is shorter."""
    one = cut(in_pieces(), min_prefill_tokens=64)
    for place in range(3):
        budget = one.token_budget(SHAPE, 0, 0.0072, 0.04 * place, patient_s=UNNOTICED_S)
        one.ran(budget - 30, is_used_up=True, now_s=0.04 * place)
        assert 0.035 < 4e-3 + 2e-5 * budget < 0.042
    assert one.token_budget(SHAPE, 0, 0.0072, 1.0) < budget


def test_under_a_backlog_no_such_step_gets_shorter():
    """For ten times `drain_s` all steps are used up, so that the target may be widened."""
    one = cut(in_pieces(), min_prefill_tokens=64)
    budgets = []
    for place in range(1250):
        budgets.append(one.token_budget(SHAPE, 0, 0.0072, 0.04 * place, patient_s=UNNOTICED_S))
        one.ran(budgets[-1] - 30, is_used_up=True, now_s=0.04 * place)
    assert min(budgets) == budgets[0]


def test_no_chunk_is_worth_more_than_what_hardly_a_reader_notices():
    """Above the graph a step takes 19 ms more, whatever else takes how long: 40 ms are 750 tokens.

    Of larger chunks a token takes less, and no pause follows one.
    """
    model = StepTimeModel()
    model.graph_tokens = 512
    for tokens in (0, 0, 0, 0, 64, 128, 300, 700, 1500, 0, 3000, 8000, 200, 400) * 6:
        fixed_s = 0.0 if not tokens else 0.011 if tokens + 30 <= 512 else 0.019
        model.observe(prefilling(tokens), 0.006 + fixed_s + 2e-5 * tokens)
    one = cut(model, min_prefill_tokens=64)
    for place in range(20):
        tokens = one.token_budget(SHAPE, 0, 0.0072, 0.04 * place, patient_s=UNNOTICED_S) - 30
        one.ran(tokens, is_used_up=True, now_s=0.04 * place)
        assert 0.035 < 0.025 + 2e-5 * tokens < 0.042


@pytest.mark.parametrize("patient_s", [0.03, 0.035, UNNOTICED_S])
def test_of_an_engine_that_is_hardly_known_no_much_larger_chunk_is_asked(patient_s):
    """Chunks of 64 tokens do not say what 2,000 take."""
    model = StepTimeModel()
    model.graph_tokens = 256
    one, now_s, largest = cut(model, min_prefill_tokens=64), 0.0, 64
    for tokens in (0, 0, 0, 0, *[64] * 12):
        model.observe(prefilling(tokens), 0.017 if tokens else 0.006)
    while now_s < 2:
        tokens = one.token_budget(SHAPE, 0, 0.0072, now_s, patient_s=patient_s) - 30
        least_s = 0.006 if not tokens else 0.017 if tokens + 30 <= 256 else 0.025
        seconds = max(least_s, 4e-3 + 2e-5 * (tokens + 30))
        assert tokens <= 2 * largest
        largest = max(largest, tokens)
        one.ran(tokens, is_used_up=True, now_s=now_s)
        model.observe(prefilling(tokens), seconds)
        now_s += seconds
    assert largest > 500


@pytest.mark.parametrize("least", [1, 528])
def test_where_the_smallest_chunk_is_in_time_a_step_is_no_longer(least):
    """Also where no prompt can be computed in fewer tokens than its blocks have."""
    model = StepTimeModel()
    for tokens in (0, 0, 0, 0, 64, 128, 300, 700, 1500, 3000) * 6:
        model.observe(prefilling(tokens), max(0.008, 0.006 + 1.5e-5 * tokens))
    usual, longer = (
        cut(model).token_budget(SHAPE, 0, 0.0096, 0.0, least, patient_s=patient_s)
        for patient_s in (0.0, UNNOTICED_S)
    )
    assert usual == longer
    assert usual - 30 >= least


def test_a_budget_is_raised_for_a_probe_within_the_graph_alone():
    """Not in a step that decodes only; beyond the graph where the step is launched anyway."""
    one = cut(in_pieces())
    raised = {budget: one.probe_budget(SHAPE, budget) for budget in (30, 31, 256, 257)}
    assert raised == {30: 30, 31: 256, 256: 256, 257: FULL}
    assert cut(trained()).probe_budget(SHAPE, 31) == FULL


def test_where_decoding_takes_longer_than_readers_notice_nothing_changes():
    """A decode of 45 ms, and 30 ms more with any prefill."""

    def engine() -> StepTimeModel:
        model = StepTimeModel()
        model.graph_tokens = 256
        for tokens in [0] * 12 + [20, 60, 120, 200, 400, 700, 1000, 2000] * 4:
            model.observe(prefilling(tokens), 0.045 + (0.03 if tokens else 0) + 2e-5 * tokens)
        return model

    for now_s in (0.0, 0.1, 0.2, 0.3):
        one, other = cut(engine()), cut(engine())
        budget = one.token_budget(SHAPE, 0, 0.054, now_s, patient_s=UNNOTICED_S)
        assert budget == other.token_budget(SHAPE, 0, 0.054, now_s, patient_s=0.0)


def test_a_pause_between_launches_holds_nobody_up():
    """Not a piece that the graph has no room for, nor a step in which nothing decodes."""
    one = cut(in_pieces(), min_prefill_tokens=64)
    assert used(one, 0.0) > 500
    assert one.token_budget(SHAPE, 0, 0.0072, 0.001) == 30
    assert one.token_budget(SHAPE, 0, 0.0072, 0.001, least=4000) >= 4030
    no_decode = StepShape(0, 0, 20_000)
    assert one.token_budget(no_decode, 0, 0.0072, 0.001) > 0


def test_a_launch_that_stalled_does_not_make_a_long_pause():
    model = in_pieces()
    for _ in range(3):
        model.observe(prefilling(1000), 5.0)
    one = cut(model, min_prefill_tokens=64)
    used(one, 0.0)
    assert used(one, 0.2) > 0


def test_a_room_that_no_prompt_uses_makes_no_pause():
    """Another prompt, or a probe, may come in the next step."""
    one = cut(in_pieces(), min_prefill_tokens=64)
    for place in range(12):
        assert one.token_budget(SHAPE, 0, 0.0072, 0.006 * place) > 530
        one.ran(20, is_used_up=False, now_s=0.006 * place)


def test_a_step_beside_answers_is_not_as_long_as_the_engine_allows():
    """A fit that takes tokens for free asks for as many as there are."""
    model = in_pieces()
    model._prefill.coefficients = (0.017, 1e-12, 0.0, 0.0, 0.008)
    for rates in (model._rates, ChunkRates()):
        model._rates = rates
        assert used(cut(model, min_prefill_tokens=64), 0.0) <= 1024


def test_a_target_that_the_graph_meets_keeps_steps_within_it():
    """Who asks for 22 ms between tokens gets them, though larger chunks took less per token."""
    one = cut(in_pieces(), min_prefill_tokens=64)
    assert 0 < one.token_budget(SHAPE, 0, 0.022, 0.0) - 30 <= 226


@pytest.mark.parametrize("patient_s", [0.0, UNNOTICED_S])
@pytest.mark.parametrize(("tokens_of_each", "most_s"), [(32_768, 3.0), (100, 12.0)])
def test_a_first_prompt_in_pieces_that_take_long_is_soon_computed_in_larger_ones(
    tokens_of_each, most_s, patient_s
):
    """An engine has computed prompts beside answers in the least chunks alone.

    Prompts that are shorter than two of these are not worth a longer step.
    """
    model = StepTimeModel()
    model.graph_tokens = 256
    one = cut(model, min_prefill_tokens=64)
    done, spent_s, largest = 0, 0.0, 0
    while done < 32_768 and spent_s < 20:
        default_s, rest = one.default_itl_s(SHAPE), tokens_of_each - done % tokens_of_each
        budget = one.token_budget(SHAPE, 0, default_s, spent_s, rest=rest, patient_s=patient_s)
        tokens = min(budget - SHAPE.decode_tokens, rest)
        one.ran(tokens, is_used_up=True, now_s=spent_s)
        largest = max(largest, tokens)
        least_s = 0.006 if not tokens else 0.017 if tokens + 30 <= 256 else 0.025
        seconds = max(least_s, 4e-3 + 2e-5 * (tokens + 30))
        model.observe(prefilling(tokens), seconds)
        done, spent_s = done + tokens, spent_s + seconds
    # Four steps of the full budget take 0.7 s; 512 of the least chunk 8.7 s.
    assert spent_s < most_s
    assert largest <= tokens_of_each


def test_who_asks_for_a_latency_that_small_chunks_keep_gets_it():
    """Also where these take longer than decoding: a chunk adds 8 ms and 50 us per token."""
    model = StepTimeModel()
    one = cut(model, min_prefill_tokens=64)
    longest_s = 0.0
    for step in range(200):
        budget = one.token_budget(SHAPE, 0, 0.022, 0.02 * step, rest=30_000)
        tokens = budget - SHAPE.decode_tokens
        seconds = 0.010 + (0.008 + 5e-5 * tokens if tokens else 0)
        model.observe(prefilling(tokens), seconds)
        longest_s = max(longest_s, seconds if step > 40 else 0)
    assert longest_s < 0.023
