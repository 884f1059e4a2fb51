"""How much prefill rides with answers."""

from rooflines import roofline, trained

from meridian_patch.config.schema import PolicyConfig
from meridian_patch.policy.step_cut import CutSettings, StepCut
from meridian_patch.policy.step_time import StepShape, StepTimeModel

FULL = 8192
SHAPE = StepShape(0, 30, 50_000)


def cut(model: StepTimeModel | None = None, **config) -> StepCut:
    return StepCut(CutSettings.of(PolicyConfig(**config), FULL), model or StepTimeModel())


def test_before_data_the_budget_is_a_fixed_share():
    """The engine's budget over think_batch_multiplier, and never more than the engine's."""
    assert cut().token_budget(SHAPE, 0, None, 0.0) == 30 + int(FULL / 2.5)
    assert cut(think_batch_multiplier=1.0).token_budget(SHAPE, 0, None, 0.0) == FULL


def test_with_data_the_step_keeps_the_target():
    """The default is step_cut_factor times the decode-only step; a target replaces it."""
    one = cut(trained())
    default_s = one.default_itl_s(SHAPE)
    assert 1.1 < default_s / roofline(SHAPE) < 1.3
    for target_s in (default_s, 0.05):
        tokens = one.token_budget(SHAPE, 0, target_s, 0.0)
        took = roofline(SHAPE._replace(prefill_tokens=tokens - 30))
        assert 0.85 < took / target_s < 1.1


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
    assert 120 < one.token_budget(shape, 0, one.default_itl_s(shape), 0.0) - 30 < 180


def test_a_cut_that_does_not_drain_is_widened_and_comes_back():
    """Saturation guard: doubled per drain_s after the first, until a step leaves something over."""
    one = cut(trained(), drain_s=5.0)

    def prefill(now_s: float) -> int:
        return one.token_budget(SHAPE, 0, 0.01, now_s) - 30

    before = prefill(0.0)
    one.ran(is_used_up=True, now_s=0.0)
    assert prefill(4.9) == before
    assert prefill(10.0) == 2 * before
    assert prefill(15.0) == 4 * before
    assert prefill(1000.0) == FULL - 30
    one.ran(is_used_up=False, now_s=1000.0)
    assert prefill(1000.0) == before
