"""Section exit, a request's own fields, and a family's probe text."""

from dataclasses import dataclass

import pytest

from meridian_patch.config.family_files import load_families
from meridian_patch.config.load import load_config
from meridian_patch.config.matching import ModelIdentity, match_family
from meridian_patch.config.request_options import (
    RequestOptions,
    check_reserve,
    kept_history,
    parse_options,
)
from meridian_patch.config.schema import ExitConfig
from meridian_patch.errors import ConfigError
from meridian_patch.exit.strategies.base import NO_SIGNALS, Signals, ThoughtStart
from meridian_patch.exit.strategies.build import SWITCHES, build_strategies
from meridian_patch.exit.strategies.loop import LoopBreaker
from meridian_patch.exit.text_breaks import find_breaks

SET = "MERIDIAN_PATCH_SET_EXIT__"


def test_defaults():
    """Observing, with the published constants; upper bounds are the operator's alone."""
    config = load_config({}).config.exit
    assert (config.mode, config.max_think_tokens) == ("observe", None)
    assert (config.rpdi_window_tokens, config.rpdi_lambda) == (512, 2.0)
    assert config.eat_warmup_probes == 4 / config.eat_alpha
    assert config.eat_delta == pytest.approx(1e-3 * 0.6931**2, rel=0.01)
    reasons = [s.reason for s in build_strategies(config, ThoughtStart(find_breaks([])))]
    assert reasons == ["eat", "rpdi"]


def test_every_strategy_can_be_switched():
    """Bounds come last: at the same token a strategy's reason says more."""
    config = ExitConfig(eat=False, end_probability=True, loop=True, max_think_tokens=900)
    reasons = [s.reason for s in build_strategies(config, ThoughtStart(find_breaks([]), 800))]
    assert reasons == ["rpdi", "end_probability", "loop", "hard_cap", "budget"]


def test_each_switch_is_that_of_one_strategy():
    """A switch is named as the reason of its strategy; without switches there are bounds alone."""
    assert {"eat", "rpdi", "end_probability"} <= set(SWITCHES)
    off = dict.fromkeys(SWITCHES, False)
    for switch in SWITCHES:
        config = ExitConfig(**off | {switch: True})
        (strategy,) = build_strategies(config, ThoughtStart(find_breaks([])))
        assert strategy.reason == switch
    assert not build_strategies(ExitConfig(**off), ThoughtStart(find_breaks([])))


@pytest.mark.parametrize("mode", ["off", "observe", "enforce"])
def test_mode_can_be_set_in_the_environment(mode):
    """YAML 1.1 reads a bare off as false; here it is a word."""
    assert load_config({f"{SET}MODE": mode}).config.exit.mode == mode


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"MODE": "on"}, ["exit.mode is 'on'", "'observe'"]),
        ({"MIN_THINK_TOKENS": "-1"}, ["exit.min_think_tokens is -1", "equal to 0"]),
        ({"EAT_ALPHA": "1.0"}, ["exit.eat_alpha is 1.0", "less than 1"]),
        ({"EAT_DELTA": ".nan"}, ["exit.eat_delta is nan"]),
        ({"RPDI_LAMBDA": "1.0"}, ["exit.rpdi_lambda is 1.0", "greater than 1"]),
        ({"END_PROBABILITY_THRESHOLD": "1.5"}, ["less than or equal to 1"]),
        (
            {"MIN_THINK_TOKENS": "600", "MAX_THINK_TOKENS": "500"},
            ["expected min_think_tokens (600) to be at most max_think_tokens (500)"],
        ),
        ({"ANSWER_RESERVE": "1.5"}, ["answer_reserve is 1.5", "a share of max_tokens below 1"]),
        ({"LOOP_MIN_COUNT": "1"}, ["exit.loop_min_count is 1", "equal to 2"]),
        ({"LOOP_MAX_PATTERN_SIZE": "2000"}, ["less than or equal to 1024"]),
        (
            {"LOOP_MAX_PATTERN_SIZE": "4", "LOOP_MIN_PATTERN_SIZE": "8"},
            ["expected loop_min_pattern_size (8) to be at most loop_max_pattern_size (4)"],
        ),
        (
            {"PROBE_MIN_GAP_TOKENS": "300"},
            ["expected probe_min_gap_tokens (300) to be at most probe_max_gap_tokens (256)"],
        ),
    ],
)
def test_wrong_values(values, parts):
    """One sentence that names the key, what came and what was expected."""
    with pytest.raises(ConfigError) as error:
        load_config({SET + name: value for name, value in values.items()})
    for part in parts:
        assert part in str(error.value)


def test_a_relative_trace_counts_from_the_file(tmp_path):
    """A file that is there and one that is not yet; unset by default."""
    assert load_config({}).config.exit.trace is None
    file = tmp_path / "config.yaml"
    file.write_text("version: 1\nexit:\n  trace: trace.jsonl\n")
    env = {"MERIDIAN_PATCH_CONFIG": str(file)}
    assert load_config(env).config.exit.trace == tmp_path / "trace.jsonl"
    (tmp_path / "trace.jsonl").write_text("")
    assert load_config(env).config.exit.trace == tmp_path / "trace.jsonl"


@pytest.mark.parametrize("place", ["none_such/trace.jsonl", ".", "file/trace.jsonl"])
def test_a_trace_that_cannot_be_written(tmp_path, place):
    """No directory, a directory itself, and a file in its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as error:
        load_config({f"{SET}TRACE": str(tmp_path / place)})
    assert str(error.value) == (
        f"environment variable {SET}TRACE: exit.trace is {str(tmp_path / place)!r}, expected a "
        "file that can be written, in an existing directory"
    )


def test_a_trace_in_a_directory_without_permission(tmp_path, monkeypatch):
    """As the operating system says; root may write everywhere."""
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="expected a file that can be written"):
        load_config({f"{SET}TRACE": str(tmp_path / "trace.jsonl")})


def test_a_maximum_alone_is_no_clash():
    """The default floor gives way to a lower maximum."""
    assert load_config({f"{SET}MAX_THINK_TOKENS": "100"}).config.exit.max_think_tokens == 100


def test_a_request_has_its_own():
    """Its fields stand in for the configuration; nothing asked, nothing changed."""
    config = ExitConfig(eat=False, rpdi=False)
    for extra_args in (None, {"other": 1}, {"meridian_itl_ms": 40.0}):
        options = parse_options(extra_args)
        assert not options.has_exit_options
        assert options.exit_config(config) == config
    options = parse_options(
        {
            "meridian_exit": "enforce",
            "meridian_max_think_tokens": 4000,
            "meridian_min_think_tokens": 100,
            "meridian_eat_delta": 0.01,
            "meridian_rpdi_lambda": 3,
            "meridian_itl_ms": 40.0,
        }
    )
    assert options.has_exit_options
    mine = options.exit_config(config)
    assert (mine.mode, mine.min_think_tokens, mine.max_think_tokens) == ("enforce", 100, 4000)
    assert (mine.eat, mine.eat_delta, mine.rpdi, mine.rpdi_lambda) == (True, 0.01, True, 3.0)
    off = parse_options({"meridian_exit": "off"}).exit_config(config)
    assert off == config.model_copy(update={"mode": "off"})


@pytest.mark.parametrize(
    ("arguments", "history"),
    [
        (None, None),
        ({"enable_thinking": True, "preserve_thinking": "yes"}, None),
        ({"preserve_thinking": True}, "keep"),
        ({"clear_thinking": False}, "keep"),
        ({"truncate_history_thinking": False, "clear_thinking": True}, "keep"),
        ({"preserve_thinking": False}, "keep_in_tool_loop"),
        ({"clear_thinking": True}, "keep_in_tool_loop"),
    ],
)
def test_arguments_of_the_template_say_what_becomes_of_thoughts(arguments, history):
    """As far as they are known."""
    assert kept_history(arguments) == history


def test_all_fields_have_the_prefix():
    assert all(name.startswith("meridian_") for name in RequestOptions.model_fields)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("meridian_exit", "on", "expected 'off', 'observe' or 'enforce'"),
        ("meridian_exit", False, "expected 'off', 'observe' or 'enforce'"),
        ("meridian_max_think_tokens", 0, "expected greater than or equal to 1"),
        ("meridian_min_think_tokens", -1, "expected greater than or equal to 0"),
        ("meridian_min_think_tokens", "5", "expected a valid integer"),
        ("meridian_eat_delta", 0.0, "expected greater than 0"),
        ("meridian_rpdi_lambda", 1.0, "expected greater than 1"),
        ("meridian_rpdi_lambda", float("inf"), "expected a finite number"),
        ("meridian_loop_min_count", 1, "expected greater than or equal to 2"),
        ("meridian_loop_max_pattern_size", 1025, "expected less than or equal to 1024"),
        ("meridian_loop_min_pattern_size", -1, "expected greater than or equal to 0"),
        ("meridian_answer_reserve", 0, "expected a whole number of tokens, at least 1, or a share"),
        ("meridian_answer_reserve", 1.0, "expected a whole number of tokens"),
        ("meridian_answer_reserve", "5", "expected a whole number of tokens"),
        ("meridian_answer_reserve", True, "expected a whole number of tokens"),
        ("meridian_eat_alpha", 0.1, "expected a field that exists"),
    ],
)
def test_a_wrong_field_is_one_sentence(name, value, expected):
    """It names the field, what came and what was expected."""
    with pytest.raises(ConfigError) as error:
        parse_options({name: value})
    assert str(error.value).startswith(f"vllm_xargs field {name} is {value!r}, {expected}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("meridian_exit_patterns", ["x" * 1000] * 100_000),
        ("meridian_exit_patterns", [[["x" * 10**6] * 9] * 9] * 9),
        ("meridian_wrap_up", "x" * 10**7),
        ("meridian_priority", {"a" * 10**6: "b"}),
        ("meridian_itl_ms", -(10**4000)),
    ],
)
def test_a_message_is_no_longer_than_a_page(name, value):
    """A request may be large, and its answer and the log must not be."""
    with pytest.raises(ConfigError) as error:
        parse_options({name: value})
    assert str(error.value).startswith(f"vllm_xargs field {name} is ")
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "name", ["meridian_" + "x" * 1_000_000, "meridian_\n2026 ERROR all is lost"]
)
def test_a_clients_name_of_a_field_makes_no_line_and_no_page_in_a_log(name):
    with pytest.raises(ConfigError, match="expected a field that exists") as error:
        parse_options({name: 1})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("reserve", [300, 0.25])
def test_a_reserve_is_tokens_or_a_share(reserve):
    """The request's stands in for the server's."""
    assert load_config({f"{SET}ANSWER_RESERVE": str(reserve)}).config.exit.answer_reserve == reserve
    options = parse_options({"meridian_answer_reserve": reserve})
    assert options.exit_config(ExitConfig(answer_reserve=5)).answer_reserve == reserve
    check_reserve(options, 301)
    check_reserve(options, None)


@pytest.mark.parametrize("max_tokens", [200, 300])
def test_a_reserve_that_leaves_nothing_to_think_is_refused(max_tokens):
    """It names field, value and bound."""
    with pytest.raises(ConfigError, match=rf"is 300, .* less than max_tokens, .*{max_tokens}"):
        check_reserve(parse_options({"meridian_answer_reserve": 300}), max_tokens)


def test_bounds_of_a_request_that_clash():
    """Both are named."""
    with pytest.raises(ConfigError, match=r"min_think_tokens is 9, expected at most .*which is 5"):
        parse_options({"meridian_min_think_tokens": 9, "meridian_max_think_tokens": 5})


def test_sizes_of_a_loop_that_clash():
    """Both are named."""
    with pytest.raises(ConfigError, match=r"min_pattern_size is 9, expected at most .*which is 5"):
        parse_options({"meridian_loop_min_pattern_size": 9, "meridian_loop_max_pattern_size": 5})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_count": 3}, (8, 256, 3)),
        ({"max_pattern_size": 4}, (1, 4, 4)),
        ({"max_pattern_size": 300}, (1, 300, 4)),
        ({"min_pattern_size": 500}, (500, 500, 4)),
        ({"min_pattern_size": 0, "max_pattern_size": 20, "min_count": 2}, (0, 20, 2)),
    ],
)
def test_a_request_has_loops_of_its_own(fields, expected):
    """Any of the fields switches it on; a greatest size alone has vLLM's least."""
    options = parse_options({f"meridian_loop_{name}": value for name, value in fields.items()})
    config = options.exit_config(ExitConfig())
    assert options.has_exit_options
    assert config.loop
    sizes = config.loop_min_pattern_size, config.loop_max_pattern_size
    assert (*sizes, config.loop_min_count) == expected


@pytest.mark.parametrize("fields", [{}, {"min_pattern_size": 2}])
def test_vllms_own_settings_find_what_vllm_finds(fields):
    """A cycle of three tokens, with a greatest size of eight: of the server and of a request."""
    ours = {"max_pattern_size": 8, "min_count": 4} | fields
    server = ExitConfig(**{f"loop_{name}": value for name, value in ours.items()})
    options = parse_options({f"meridian_loop_{name}": value for name, value in ours.items()})
    for config in (server, options.exit_config(ExitConfig(loop_min_pattern_size=8))):
        breaker = LoopBreaker.of(config, ThoughtStart(find_breaks([])))
        tokens = [1, 2, 3] * 10
        firing = breaker.accept(tokens, Signals.of([NO_SIGNALS] * len(tokens)), 0)
        params = RepetitionParams(**ours)
        assert firing.at + 1 == next(n for n in range(31) if params.has_loop(tokens[:n])) == 12


@dataclass
class RepetitionParams:
    """vLLM's ``RepetitionDetectionParams``, and its check by the words of its documentation."""

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def has_loop(self, tokens):
        sizes = range(self.min_pattern_size, self.max_pattern_size + 1)
        return any(
            tokens[-size * self.min_count :] == tokens[-size:] * self.min_count
            for size in sizes
            if size * self.min_count <= len(tokens)
        )


def test_a_least_size_that_follows_the_greatest_is_not_set():
    """So a family's file may have its own."""
    config = ExitConfig(loop_max_pattern_size=4)
    assert config.loop_min_pattern_size == 1
    assert "loop_min_pattern_size" not in config.model_fields_set
    assert ExitConfig().loop_min_pattern_size == 8


def test_probe_texts_end_the_thought():
    """Every packaged probe holds an end marker; the default surrounds it with line breaks."""
    families = {name: file.family for name, file in load_families().items()}
    for family in families.values():
        assert any(end.strip() in family.probe_text for _, end in family.pairs)
    assert families["qwen3_hybrid"].probe_text == "\n</think>\n\n"
    assert families["r1_0528_qwen3_8b"].probe_text == "\n</think>\n"
    assert families["gpt_oss"].probe_text == families["gpt_oss"].close


def test_families_that_share_a_parser_may_differ_in_the_probe():
    """What they do not agree on is left to the default."""
    match = match_family(load_families(), ModelIdentity((), (), "deepseek_r1"))
    assert match.how == "parser"
    assert match.family.probe is None
