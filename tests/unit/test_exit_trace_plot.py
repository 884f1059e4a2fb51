"""``meridian bench exit-trace``: what it reads, draws, and refuses."""

import json

import pytest

from meridian_patch.bench.exit_trace import read_trace
from meridian_patch.cli import main
from meridian_patch.errors import BenchError

PNG = b"\x89PNG"


def event(kind, request="chat-0a1b2c3d", think_tokens=10, thought=1, **fields):
    head = {"event": kind, "request": request, "thought": thought}
    return head | {"think_tokens": think_tokens} | fields


def probe(think_tokens, entropy_nats=1.0, variance_nats2=0.1, **fields):
    values = {"entropy_nats": entropy_nats, "variance_nats2": variance_nats2}
    return event("probe", think_tokens=think_tokens, **values, **fields)


VERDICT = event("verdict", think_tokens=21, reason="eat", fired_at=20, why="steady")
END = event("end", think_tokens=40, reason="natural", verdict=None)


@pytest.fixture
def trace(tmp_path):
    def write(*events):
        file = tmp_path / "trace.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in events))
        return file

    return write


def run(*arguments):
    """Exit code of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "exit-trace", *map(str, arguments)])
    return ended.value.code


def test_events_by_thought(trace):
    """Events of several requests and thoughts, mixed in the file."""
    found = read_trace(trace(probe(8), probe(9, request="x-1"), VERDICT, END, probe(7, thought=2)))
    assert found == [[probe(8), VERDICT, END], [probe(9, request="x-1")], [probe(7, thought=2)]]


@pytest.mark.parametrize("size", ["1", "2", "5"])
def test_a_picture(trace, tmp_path, capsys, size):
    """Also of results that are not numbers, and of thoughts without verdict or end."""
    others = [probe(n, request=f"r{i}-0", variance_nats2=None) for i in range(3) for n in (5, 9)]
    file = trace(probe(8), probe(16, None, None), probe(24, 0.1, 0.0), VERDICT, END, *others)
    out = tmp_path / "new" / "picture.png"
    assert run(file, "--out", out, "--thoughts", size) == 0
    assert out.read_bytes().startswith(PNG)
    assert str(out) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (probe("8"), "field think_tokens is '8'"),
        (probe(8, True), "field entropy_nats is True"),
        ({**VERDICT, "reason": 1}, "field reason is 1"),
        ({"event": []}, r"field event is \[\]"),
        ([1], "not an object"),
    ],
)
def test_a_field_of_another_type_is_refused(trace, wrong, says):
    """Here, and not where it is drawn."""
    with pytest.raises(BenchError, match=f"line 2 is .* expected an event of exit.trace: {says}"):
        read_trace(trace(END, wrong))


def test_what_is_refused(trace, tmp_path, capsys):
    """One sentence: no file, no trace, no probe, a wrong number."""
    (tmp_path / "text").write_text('{"event": "probe"}\n')
    cases = [
        ([tmp_path / "none"], "cannot be read"),
        ([tmp_path / "text"], 'line 1 is \'{"event": "probe"}\', expected an event'),
        ([trace(END)], "holds no probe"),
        ([tmp_path / "any", "--thoughts", "0"], "--thoughts is '0'"),
    ]
    for arguments, said in cases:
        assert run(*arguments) == 1
        assert said in capsys.readouterr().err
