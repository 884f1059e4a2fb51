"""Who makes room, who reads what by when, and what requests may ask for."""

import pytest

from meridian_patch.config.policy import PolicyConfig
from meridian_patch.config.request_options import NO_OPTIONS, parse_options
from meridian_patch.errors import ConfigError
from meridian_patch.policy.pacing import MOST_TARGETS, Reading, next_due_s
from meridian_patch.policy.time_sharing import SharingSettings, Thinker, TimeSharing


class PricedModel:
    """Computing a token again takes a millisecond."""

    def prefill_seconds(self, tokens: int) -> float:
        return tokens * 1e-3

    def tokens_within(self, seconds: float) -> int:
        return round(seconds * 1e3)


def sharing(seconds: float = 100.0, **config) -> TimeSharing:
    one = TimeSharing(SharingSettings.of(PolicyConfig(**config)), PricedModel())
    one.advance(0.0)
    one.advance(seconds)
    return one


def thinker(name: str, attained: int, *, held: int = 100, preemptions: int = 0) -> Thinker:
    return Thinker(name, held, attained, preemptions)


def chosen(one: TimeSharing, thinkers, missing: int = 0, **freed: int) -> list[str]:
    return [
        each.request_id
        for each in one.choose(thinkers, missing, lambda each: freed.get(each.request_id, 0))
    ]


def test_the_longest_thinker_makes_room():
    """The most attained service, above the least, and not too often."""
    some = [thinker("a", 2500), thinker("b", 9000), thinker("c", 1999)]
    assert chosen(sharing(), some) == ["b"]
    assert chosen(sharing(), [thinker("c", 1999)]) == []
    assert chosen(sharing(), [thinker("d", 5000, preemptions=3), some[0]]) == ["a"]


def test_recompute_is_paid_from_a_share_of_the_time():
    """5 % of ten seconds buy half a second of recomputing, once."""
    one = sharing(10.0, sharing_overhead=0.05)
    assert chosen(one, [thinker("a", 9000, held=600), thinker("b", 3000, held=400)]) == ["b"]
    assert chosen(one, [thinker("c", 3000, held=200)]) == []
    one.advance(13.0)
    assert chosen(one, [thinker("c", 3000, held=200)]) == ["c"]
    assert chosen(sharing(10.0, sharing_overhead=0.0), [thinker("a", 9000)]) == []


def test_only_thinkers_that_make_enough_room_are_displaced():
    """One whose blocks suffice, else several together that can be paid for, else none."""
    some = [thinker("a", 9000), thinker("b", 8000), thinker("c", 7000)]
    assert chosen(sharing(), some, 10, a=5, b=12, c=20) == ["b"]
    assert chosen(sharing(), some, 14, a=5, b=9, c=9) == ["a", "b"]
    assert chosen(sharing(), some, 24, a=5, b=9, c=9) == []
    dear = [thinker("a", 9000, held=400), thinker("b", 8000, held=400)]
    one = sharing(10.0, sharing_overhead=0.05)
    assert chosen(one, dear, 14, a=5, b=9) == []
    assert chosen(one, dear, 5, a=5, b=9) == ["a"]


def test_a_reader_with_tokens_in_hand_can_wait():
    """Due when the first has read what there is; bounded by the tightest target on both sides."""
    fast, slow = Reading(0.0, 13, 0.05), Reading(0.0, 100, 0.05)
    assert next_due_s([fast, slow], 0.5) == pytest.approx(0.15)
    assert next_due_s([slow], 0.5) == pytest.approx(MOST_TARGETS * 0.05)
    assert next_due_s([Reading(0.0, 1, 0.05), slow], 9.0) == pytest.approx(0.05)
    assert next_due_s([slow, Reading(0.0, 1000, 0.01)], 0.5) == pytest.approx(0.04)
    assert next_due_s([], 0.0) is None


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
