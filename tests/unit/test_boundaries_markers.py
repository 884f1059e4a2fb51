"""Which marker strings count when family file and server both have some."""

from pathlib import Path

import pytest

from meridian_patch.config.family_files import FamilyFile, load_families
from meridian_patch.config.matching import FamilyMatch, forced_match
from meridian_patch.errors import BoundaryError
from meridian_patch.phase.markers import ServerStrings, choose_markers

FAMILIES = load_families()


def match_of(name, how="name"):
    file = FAMILIES[name]
    return FamilyMatch(name, file.family, str(file.path), how, "evidence")


def texts(markers):
    return [m.text for m in markers.start], [m.text for m in markers.end], markers.close.text


def test_family_alone():
    """Without strings of the server the family file counts."""
    markers = choose_markers("m", match_of("gpt_oss"), ServerStrings())
    assert texts(markers) == (
        ["<|channel|>analysis<|message|>"],
        ["<|end|>"],
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    )
    assert markers.close.field == "close"
    assert "gpt_oss.yaml" in markers.close.origin


def test_alternatives_and_implicit_ends_count():
    """All spellings open and end thinking; only the first is forced."""
    markers = choose_markers("m", match_of("k2_horizon"), ServerStrings())
    starts, ends, close = texts(markers)
    assert starts == ["<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"]
    assert ends[0] == close == "</ifm|think>"
    assert [m.field for m in markers.end][1:] == ["alternatives.0.end", "alternatives.1.end"]
    (implicit,) = markers.implicit_end
    assert (implicit.text, implicit.field) == ("<ifm|tool_calls>", "implicit_end.0")


@pytest.mark.parametrize(
    ("told", "expected", "origin"),
    [
        (None, ["<tool_call>"], "qwen3_hybrid.yaml"),
        ((), [], ""),
        (("<call>", "</think>"), ["<call>"], "--reasoning-parser p"),
    ],
)
def test_what_the_servers_parser_ends_reasoning_at_takes_precedence(told, expected, origin):
    """Clients get what the parser makes of the text; without its word the family file counts."""
    server = ServerStrings("p", "<think>", "</think>", parser_implicit_ends=told)
    for how in ("name", "config"):
        markers = choose_markers("m", match_of("qwen3_hybrid", how), server)
        assert [marker.text for marker in markers.implicit_end] == expected
        assert all(origin in marker.origin for marker in markers.implicit_end)
    alone = choose_markers("m", None, server)
    assert [marker.text for marker in alone.implicit_end] == (expected if told else [])


def test_turns_are_the_familys_and_the_parsers():
    """Each may know some; whether a thought is open before the first token is the parser's."""
    server = ServerStrings(
        "p", "<think>", "</think>", parser_turn_starts=("<turn>",), begins_reasoning=True
    )
    markers = choose_markers("m", match_of("qwen3_hybrid"), server)
    assert markers.turn_start == ("<|im_start|>", "<turn>")
    assert markers.begins_reasoning
    assert choose_markers("m", None, server).turn_start == ("<turn>",)


@pytest.mark.parametrize(
    ("family", "start", "end"),
    [
        ("qwen3_hybrid", "<think>", "</think>"),
        ("gemma4", "<|channel>", "<channel|>"),
        ("hunyuan_a13b", "<think>", "</think>"),
        ("k2_horizon", "<ifm|think_fast>", "</ifm|think_fast>"),
        ("granite_32", "", ""),
    ],
)
def test_agreeing_parser(family, start, end):
    """A parser may know a shorter marker, or another spelling; the file's marker counts."""
    server = ServerStrings(parser="p", parser_start=start, parser_end=end)
    markers = choose_markers("m", match_of(family), server)
    assert markers == choose_markers("m", match_of(family), ServerStrings())


@pytest.mark.parametrize(
    ("server", "parts"),
    [
        (
            ServerStrings(parser="p", parser_start="[THINK]", parser_end="</think>"),
            ["start is '<think>'", "reasoning_start_str of --reasoning-parser p is '[THINK]'"],
        ),
        (
            ServerStrings(parser="p", parser_start="<think>", parser_end="[/THINK]"),
            ["end is '</think>'", "reasoning_end_str of --reasoning-parser p is '[/THINK]'"],
        ),
        (
            ServerStrings(start="<thought>"),
            ["start is '<think>'", "reasoning_start_str of --reasoning-config is '<thought>'"],
        ),
        (
            ServerStrings(end="Enough."),
            ["end is '</think>'", "--reasoning-config is 'Enough.'", "does not hold it"],
        ),
    ],
)
def test_disagreement_is_refused(server, parts):
    """Two truths about one model stop the engine; the message names both and the ways out."""
    with pytest.raises(BoundaryError) as error:
        choose_markers("/models/m", match_of("qwen3_hybrid"), server)
    for part in ["model /models/m", "qwen3_hybrid.yaml", "family: qwen3_hybrid", *parts]:
        assert part in str(error.value)


def test_forced_family_wins_over_a_disagreeing_parser():
    """The operator's word counts, and the disagreement is noted."""
    match = forced_match(FAMILIES["qwen3_hybrid"], "file c.yaml")
    server = ServerStrings(parser="mistral", parser_start="[THINK]", parser_end="[/THINK]")
    markers = choose_markers("m", match, server)
    assert texts(markers) == (["<think>"], ["</think>"], "</think>")
    assert "[THINK]" in markers.notes[0]


def test_family_found_by_the_parser_gives_way_to_it():
    """A checkpoint may put a suffix into the markers that its parser reads from the vocabulary."""
    server = ServerStrings(parser="hy_v3", parser_start="<think:6>", parser_end="</think:6>")
    markers = choose_markers("m", match_of("hy3_preview", "parser"), server)
    assert texts(markers) == (["<think:6>"], ["</think:6>"], "</think:6>")
    assert markers.label == "<parser hy_v3>"
    assert markers.match is None


def test_configured_end_string_is_forced():
    """vLLM forces reasoning_end_str; the marker in it is what ends thinking."""
    server = ServerStrings(end="That is enough.</think>")
    markers = choose_markers("m", match_of("qwen3_hybrid"), server)
    assert texts(markers) == (["<think>"], ["</think>"], "That is enough.</think>")
    assert markers.close.origin == "--reasoning-config"


def test_server_strings_without_a_family():
    """The parser's end is the natural one, the configured end is forced."""
    server = ServerStrings("p", "<a>", "</a>", start="<b>", end="So.</a>")
    markers = choose_markers("m", None, server)
    assert texts(markers) == (["<b>"], ["</a>"], "So.</a>")
    assert (markers.label, markers.start[0].origin) == ("<parser p>", "--reasoning-config")
    assert markers.end[0].origin == "--reasoning-parser p"


def test_configured_strings_alone():
    """Without a parser the configured end string is the natural one too."""
    markers = choose_markers("m", None, ServerStrings(start="<b>", end="</b>"))
    assert texts(markers) == (["<b>"], ["</b>"], "</b>")
    assert markers.label == "<reasoning config>"


@pytest.mark.parametrize(
    "server", [ServerStrings(), ServerStrings(parser="p"), ServerStrings(start="<b>")]
)
def test_nothing_known(server):
    """Half a pair of markers is no boundary."""
    assert choose_markers("m", None, server) is None


def test_origin_names_the_file_that_was_read():
    """Messages lead to the replacing file, not to the packaged one."""
    file = FamilyFile(FAMILIES["gpt_oss"].family, Path("/own/gpt_oss.yaml"))
    markers = choose_markers("m", forced_match(file, "env X"), ServerStrings())
    assert markers.start[0].origin == "file /own/gpt_oss.yaml"
