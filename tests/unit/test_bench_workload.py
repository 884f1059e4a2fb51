import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from meridian_patch.bench.served.workload import (
    Mix,
    Turns,
    conversations,
    make_conversations,
    make_trace,
    read_trace,
    write_trace,
)
from meridian_patch.errors import BenchError

TURNS = Turns(requests=200, rate_per_s=2.0)
LINE = {
    "id": "1-0",
    "arrival_s": 0.5,
    "messages": [{"role": "user", "content": "p=7, q=p+5. q?"}],
    "expected": "2",
    "max_tokens": 64,
}


def read_line(folder: Path, line: dict | str) -> list:
    path = folder / "trace.jsonl"
    path.write_text((line if isinstance(line, str) else json.dumps(line)) + "\n")
    return read_trace(path)


def test_trace_depends_on_its_seed_alone():
    """The same seed draws the same trace, another seed another."""
    mix = Mix(requests=30, rate_per_s=4.0)
    assert make_trace(mix, 7) == make_trace(mix, 7)
    assert make_trace(mix, 7) != make_trace(mix, 8)


def test_seeds_share_no_question():
    """No two seeds ask the same, so that no seed profits from another's prefix cache."""
    mix = Mix(requests=60, rate_per_s=4.0)
    asked = [{r.messages[-1]["content"] for r in make_trace(mix, seed)} for seed in (1, 2)]
    # Problems of two steps are few enough to be drawn twice now and then.
    assert len(asked[0] & asked[1]) <= 2


def test_arrivals_keep_the_rate():
    """Over many requests the mean gap between arrivals is one over the rate."""
    trace = make_trace(Mix(requests=4000, rate_per_s=5.0, burstiness=0.5), 3)
    arrivals = [request.arrival_s for request in trace]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert len(trace) / arrivals[-1] == pytest.approx(5.0, rel=0.1)


def test_smaller_burstiness_bunches_arrivals():
    """A Gamma shape below one has more short gaps than Poisson arrivals."""

    def short_gaps(burstiness: float) -> int:
        trace = make_trace(Mix(requests=2000, rate_per_s=10.0, burstiness=burstiness), 3)
        gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(trace)]
        return sum(gap < 0.01 for gap in gaps)

    assert short_gaps(0.25) > 2 * short_gaps(1.0)


def test_history_share_adds_earlier_turns():
    """With share 0 every request has one message, with share 1 each has at least three."""
    plain = make_trace(Mix(20, 4.0, history_share=0.0), 1)
    with_history = make_trace(Mix(20, 4.0, history_share=1.0), 1)
    assert {len(request.messages) for request in plain} == {1}
    assert min(len(request.messages) for request in with_history) >= 3
    assert all(request.messages[-1]["role"] == "user" for request in with_history)


def test_longest_request_fits_the_servers_context():
    """History, question and the token limit together stay below the 2048 tokens of the demo."""
    trace = make_trace(Mix(2000, 4.0, history_share=1.0), 5)
    # A token of the tiny reasoner is a character; each message adds two markers.
    longest = max(sum(len(m["content"]) + 2 for m in r.messages) + r.max_tokens for r in trace)
    assert longest + len("<think>\n") < 2048


def test_conversations_are_as_asked():
    """The seed alone decides; a conversation is one system prompt and its questions in order."""
    trace = make_conversations(TURNS, 3)
    assert trace == make_conversations(TURNS, 3) != make_conversations(TURNS, 4)
    assert len(trace) == TURNS.requests
    found = conversations(trace)
    # The last one may have been cut off.
    assert {len(turns) for turns in found[:-1]} == set(range(2, 7))
    starts = [turns[0].arrival_s for turns in found]
    assert starts == sorted(starts)
    systems = {turns[0].messages[0]["content"] for turns in found}
    assert len(systems) == TURNS.system_prompts
    assert all(abs(len(system) - TURNS.system_tokens) < 3 for system in systems)
    for turns in found:
        assert [m["role"] for m in turns[0].messages] == ["system", "user"]
        assert {len(turn.messages) for turn in turns[1:]} <= {1}
        assert all(b.follows == a.id for a, b in pairwise(turns))


def test_a_higher_rate_asks_the_same_questions_sooner():
    """Conversations start sooner; pauses within them are the same."""
    slow, fast = (make_conversations(replace(TURNS, rate_per_s=rate), 1) for rate in (1.0, 2.0))
    assert [turn.messages for turn in slow] == [turn.messages for turn in fast]
    for a, b in zip(slow, fast, strict=True):
        assert a.arrival_s == pytest.approx(b.arrival_s * (1 if a.follows else 2), abs=1e-5)


def test_a_turn_follows_an_earlier_request(tmp_path):
    """A turn that follows nothing, or what another turn follows, is refused at its line."""
    first, second = LINE, LINE | {"id": "b", "follows": "1-0"}
    wrong = LINE | {"id": "c", "follows": "x"}
    for lines, number in (([wrong, first], 1), ([first, second, second | {"id": "c"}], 3)):
        with pytest.raises(BenchError, match=f"line {number}: field follows is"):
            read_line(tmp_path, "\n".join(map(json.dumps, lines)))


@pytest.mark.parametrize("trace", [make_trace(Mix(25, 4.0), 2), make_conversations(TURNS, 2)])
def test_file_round_trip(tmp_path, trace):
    """What is written is read back equal."""
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"id": 3}, "field id is 3"),
        ({"arrival_s": -1}, "field arrival_s is -1"),
        ({"arrival_s": True}, "field arrival_s is True"),
        ({"expected": 2}, "field expected is 2"),
        ({"max_tokens": 0}, "field max_tokens is 0"),
        ({"max_tokens": 1.5}, "field max_tokens is 1.5"),
        ({"messages": []}, r"field messages is \[\]"),
        ({"messages": [{"role": "tool", "content": ""}]}, "field messages is"),
        ({"messages": [{"role": "user"}]}, "field messages is"),
        ({"follows": 1}, "field follows is 1"),
        ({"color": 1}, "unknown field color"),
    ],
)
def test_wrong_field_is_named(tmp_path, change, named):
    """A wrong value is refused with file, line, field and value."""
    with pytest.raises(BenchError, match=rf"trace\.jsonl line 1: {named}"):
        read_line(tmp_path, LINE | change)


def test_missing_field_is_named(tmp_path):
    """A missing field is refused by name."""
    line = {name: value for name, value in LINE.items() if name != "expected"}
    with pytest.raises(BenchError, match="line 1: field expected is missing"):
        read_line(tmp_path, line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON: lists and objects are nested too deeply"),
        ('{"id": "a", "id": "b"}', "line 1 is not JSON: key 'id' stands twice"),
        ("[1]", "line 1 is not a JSON object"),
        ("", "holds no request"),
    ],
)
def test_text_that_is_no_trace_is_refused(tmp_path, text, message):
    """What is no JSON object, or nothing at all, is refused."""
    with pytest.raises(BenchError, match=message):
        read_line(tmp_path, text)


def test_same_id_twice_is_refused(tmp_path):
    """The second use of an id is refused at its line."""
    with pytest.raises(BenchError, match="line 2: field id '1-0' was used before"):
        read_line(tmp_path, json.dumps(LINE) + "\n" + json.dumps(LINE))


def test_unreadable_file_is_refused(tmp_path):
    """A file that is not there is an error of ours that names it."""
    with pytest.raises(BenchError, match=r"cannot read the trace .*nothing\.jsonl"):
        read_trace(tmp_path / "nothing.jsonl")
