"""Who makes room, who reads what by when, and what requests may ask for."""

import pytest

from meridian_patch.config.policy import PolicyConfig
from meridian_patch.config.request_options import NO_OPTIONS, parse_options
from meridian_patch.errors import ConfigError
from meridian_patch.policy.step_time import StepShape
from meridian_patch.policy.time_sharing import SharingSettings, Thinker, TimeSharing

SHAPE = StepShape(0, 10, 1000)


class PricedModel:
    """Computing a token again takes a millisecond; in ``price`` decoded tokens it costs as much."""

    def __init__(self, price: float = 0.0) -> None:
        self.price = price

    def recompute_price(self, shape: StepShape) -> float:
        return self.price

    def prefill_seconds(self, tokens: int) -> float:
        return tokens * 1e-3


def sharing(seconds: float = 100.0, price: float = 0.0, **config) -> TimeSharing:
    one = TimeSharing(SharingSettings.of(PolicyConfig(**config)), PricedModel(price))
    one.choose([], 0, lambda _: 0, SHAPE)
    one.advance(0.0)
    one.advance(seconds)
    return one


def thinker(name: str, *, held: int = 100, thought: int = 1000) -> Thinker:
    return Thinker(name, held, thought)


def chosen(one: TimeSharing, thinkers, missing: int = 0, **freed: int) -> list[str]:
    return [
        each.request_id
        for each in one.choose(thinkers, missing, lambda each: freed.get(each.request_id, 0), SHAPE)
    ]


def test_recompute_is_paid_from_a_share_of_the_time():
    """A debt is earned first; none is made where nothing is earned."""
    one = sharing(10.0, sharing_overhead=0.05)
    assert chosen(one, [thinker("a", held=1500)]) == ["a"]
    assert chosen(one, [thinker("b", held=1)]) == []
    one.advance(29.0)
    assert chosen(one, [thinker("b", held=1)]) == []
    one.advance(31.0)
    assert chosen(one, [thinker("b", held=1)]) == ["b"]
    assert chosen(sharing(10.0, sharing_overhead=0.0), [thinker("a")]) == []


def test_the_dearer_a_recompute_the_less_is_shared():
    """Half as dear as a decode: half is earned; as dear or dearer: a tenth."""
    for price, earned_s in ((0.0, 0.5), (0.5, 0.25), (1.0, 0.05), (9.0, 0.05)):
        one = sharing(10.0, price, sharing_overhead=0.05)
        assert one._credit_s == pytest.approx(earned_s)


def test_a_thinker_makes_no_room_before_it_has_paid_off():
    """Recomputing 1,000 tokens at half the price of decoding them: 50 tokens of thought."""
    for thought, names in ((49, []), (50, ["a"])):
        one = sharing(price=0.5)
        assert chosen(one, [thinker("a", held=1000, thought=thought)]) == names


def test_only_thinkers_that_make_enough_room_are_displaced():
    """The first one whose blocks suffice, else several from the first on, else none."""
    some = [thinker("a"), thinker("b"), thinker("c")]
    assert chosen(sharing(), some, 10, a=5, b=12, c=20) == ["b"]
    assert chosen(sharing(), some, 14, a=5, b=9, c=9) == ["a", "b"]
    assert chosen(sharing(), some, 24, a=5, b=9, c=9) == []
    assert chosen(sharing(), some, -3) == ["a"]
    assert chosen(sharing(), [], 0) == []


def test_thinkers_that_were_not_preempted_after_all_cost_nothing():
    """Their price goes back."""
    one = sharing(10.0, sharing_overhead=0.05)
    one.refund(one.choose([thinker("a", held=400)], 0, lambda _: 1, SHAPE))
    assert one._credit_s == pytest.approx(0.5)


def test_options_are_read_and_the_fields_of_others_left_alone():
    assert parse_options(None) is NO_OPTIONS
    assert parse_options({"other": object()}) is NO_OPTIONS
    options = parse_options({"meridian_itl_ms": 40.0, "meridian_max_think_tokens": 512, "other": 1})
    assert (options.itl_s, options.meridian_max_think_tokens) == (0.04, 512)
    assert parse_options({"meridian_priority": -1}).meridian_priority == -1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("meridian_itl_ms", 0.0),
        ("meridian_itl_ms", "fast"),
        ("meridian_itl_ms", float("nan")),
        ("meridian_max_think_tokens", 0),
        ("meridian_max_think_tokens", 2.5),
        ("meridian_priority", 0.5),
        ("meridian_patience", 1),
    ],
)
def test_a_wrong_option_is_one_sentence_with_the_field(name, value):
    with pytest.raises(ConfigError, match=f"vllm_xargs field {name} is .*known fields: meridian_"):
        parse_options({name: value})
