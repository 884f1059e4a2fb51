"""Trace files, and what is said of wrong ones."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_patch.bench.simulated.trace import LONGEST, TraceRequest, read_trace, write_trace
from meridian_patch.errors import BenchError

GOOD = {"id": "a", "arrival_s": 0.5, "prompt_tokens": 3, "think_tokens": 0, "answer_tokens": 1}
FIRST = GOOD | {"session": "s", "system": "x", "shared_tokens": 2}
LATER = GOOD | {"id": "b", "arrival_s": None, "session": "s", "turn": 1, "pause_s": 2.0}

tokens = st.integers(1, LONGEST)
seconds = st.floats(0, 1e7)
later_turns = st.tuples(tokens, tokens, tokens, seconds, st.booleans())
sessions = st.lists(st.tuples(seconds, st.lists(later_turns, max_size=3), st.booleans()))


def lines(*changed):
    return "\n".join(json.dumps(line) for line in changed)


def read(folder, text):
    path = folder / "trace.jsonl"
    path.write_text(text)
    return read_trace(path)


@given(sessions.filter(bool))
def test_what_is_written_is_read_back(drawn):
    """Every field comes back as it was, to the last digit."""
    trace = []
    for number, (arrival_s, later, is_session) in enumerate(drawn):
        name = f"s{number}"
        first = TraceRequest(f"{name}-0", arrival_s, 9, 0, 1, name, 0, 0.0, 4, "x")
        trace.append(first if is_session else TraceRequest(name, 1.0, 1, 2, 3))
        if is_session:
            trace += [
                TraceRequest(
                    f"{name}-{turn}", None, new, think, answer, name, turn, pause_s, system="x",
                    is_tool_result=is_tool_result,
                )
                for turn, (new, think, answer, pause_s, is_tool_result) in enumerate(later, 1)
            ]  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        write_trace(path, trace)
        assert read_trace(path) == trace


def test_a_line_is_short(tmp_path):
    """What is at its default is not written, and blank lines are skipped."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, read(tmp_path, lines(GOOD) + "\n\n"))
    assert path.read_text() == json.dumps(GOOD, separators=(",", ":")) + "\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arrival_s": -1}, "field arrival_s is -1, expected greater than or equal to 0"),
        ({"arrival_s": float("nan")}, "field arrival_s is nan, expected a finite number"),
        ({"arrival_s": "soon"}, "field arrival_s is 'soon', expected a valid number"),
        ({"arrival_s": 1e12}, "field arrival_s is 1000000000000.0, expected less than or equal"),
        ({"arrival_s": None}, "field arrival_s is None, expected seconds"),
        ({"prompt_tokens": 0}, "field prompt_tokens is 0, expected greater than or equal to 1"),
        ({"prompt_tokens": 2.5}, "field prompt_tokens is 2.5, expected a valid integer"),
        ({"think_tokens": -1}, "field think_tokens is -1, expected greater than or equal to 0"),
        ({"answer_tokens": 0}, "field answer_tokens is 0, expected greater than or equal to 1"),
        ({"answer_tokens": 1_000_001}, "field answer_tokens is 1000001, expected less than or eq"),
        ({"itl_target_ms": 40.0}, "unknown field itl_target_ms; known: id, arrival_s"),
        ({"id": ""}, "field id is '', expected"),
        ({"id": 7}, "field id is 7, expected a valid string"),
        ({"length": 7}, "unknown field length; known: id, arrival_s, prompt_tokens"),
        ({"turn": 1}, "field turn is 1, expected 0 where no session is named"),
        ({"session": "s", "turn": 1}, "field turn is 1, expected 0, the next turn of session 's'"),
        ({"pause_s": 1.0}, "field pause_s is 1.0, expected 0 at a session's first turn"),
        ({"is_tool_result": True}, "field is_tool_result is True, expected false"),
        ({"shared_tokens": 2}, "field shared_tokens is 2, expected 0 where no system prompt"),
        ({"system": "x", "shared_tokens": 4}, "expected at most prompt_tokens, which is 3"),
    ],
)
def test_a_wrong_field_is_named(change, words, tmp_path):
    """With file, line, value and what was expected."""
    other = GOOD | {"id": "other"}
    with pytest.raises(BenchError) as raised:
        read(tmp_path, lines(other, GOOD | change))
    assert str(raised.value).startswith(f"{tmp_path / 'trace.jsonl'} line 2: ")
    assert words in str(raised.value)


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_named(field, tmp_path):
    line = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(BenchError, match=f"line 1: field {field} is missing"):
        read(tmp_path, lines(line))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no request"),
        ("[1]", "line 1: .* expected one JSON object per line"),
        ("{", "line 1: Invalid JSON"),
        (lines(GOOD).rstrip().removesuffix("}") + ', "id": "b"}', "key 'id' stands twice"),
        (lines(GOOD, GOOD), "line 2: field id is 'a', expected an id that was not used before"),
        (lines(LATER), "line 1: field turn is 1, expected 0, the next turn"),
        (lines(FIRST, LATER | {"turn": 2}), "line 2: field turn is 2, expected 1, the next turn"),
        (lines(FIRST, LATER | {"arrival_s": 3.0}), "line 2: field arrival_s is 3.0, expected null"),
        (lines(FIRST, LATER | {"system": "x", "shared_tokens": 2}), "line 2: field shared_tokens"),
        (
            lines(FIRST, GOOD | {"id": "c", "system": "x", "shared_tokens": 1}),
            "line 2: field shared_tokens is 1, expected 2, as before for system 'x'",
        ),
    ],
)
def test_a_wrong_file_is_refused(text, words, tmp_path):
    with pytest.raises(BenchError, match=words):
        read(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(BenchError, match=r"cannot read the trace .*none.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")
