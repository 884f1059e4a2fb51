"""Who makes room, and what requests may ask for."""

import pytest

from meridian_patch.config.request_options import NO_OPTIONS, parse_options
from meridian_patch.errors import ConfigError
from meridian_patch.policy.time_sharing import choose_thinkers


def test_only_thinkers_that_make_enough_room_are_displaced():
    """The first one whose blocks suffice, else several from the first on, else none."""
    for missing, freed, names in (
        (10, {"a": 5, "b": 12, "c": 20}, ["b"]),
        (14, {"a": 5, "b": 9, "c": 9}, ["a", "b"]),
        (24, {"a": 5, "b": 9, "c": 9}, []),
        (-3, {"a": 0, "b": 0}, ["a"]),
        (0, {}, []),
    ):
        assert choose_thinkers(freed, missing, freed.get) == names


def test_few_are_looked_at_for_one_request():
    """Thousands of small thinkers cost no more than 32."""
    asked = []
    assert choose_thinkers(range(1000), 900, lambda one: asked.append(one) or 1) == []
    assert len(asked) == 32


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
