"""A real server that exports traces: each request's span says how its thinking ended."""

import pytest

pytestmark = pytest.mark.engine

SPAN = "llm_request"
QUESTION = "p=7, q=p+5, r=q*3. r?"
CAP = {"meridian_max_think_tokens": 8, "meridian_min_think_tokens": 0}


def ours(attributes):
    return {name: value for name, value in attributes.items() if name.startswith("meridian.")}


def test_a_span_says_what_the_response_does(traced, collector):
    """For thoughts that ended by themselves, were closed, and would have been; and for none."""
    asked = [
        {"meridian_exit": "observe"},
        CAP | {"meridian_exit": "enforce"},
        CAP | {"meridian_exit": "observe"},
    ]
    before, thought, answered = (
        len(collector.wait_for(name, 0)) for name in (SPAN, "think", "answer")
    )
    told = [
        traced.chat(QUESTION, max_tokens=300, vllm_xargs=xargs)["choices"][0]["meridian"]
        for xargs in asked
    ]
    traced.chat(QUESTION, max_tokens=3)
    spans = collector.wait_for(SPAN, before + len(asked) + 1)[before:]
    # Probes are requests, too, and belong to no client.
    assert len(spans) == len(asked) + 1
    natural, closed, observed, cut = map(ours, spans)
    for attributes, summary in zip((natural, closed, observed), told, strict=True):
        assert attributes["meridian.exit_reason"] == summary["exit_reason"]
        assert attributes["meridian.think_tokens"] == summary["think_tokens"]
    assert closed["meridian.exit_reason"] == "hard_cap"
    assert observed["meridian.would_exit.exit_reason"] == "hard_cap"
    assert observed["meridian.would_exit.think_tokens"] == told[2]["would_exit"]["think_tokens"]
    assert cut["meridian.exit_reason"] == "unanswered"
    assert cut["meridian.think_tokens"] == 3
    assert set(cut) == set(natural) - {"meridian.ttfat_ms", "meridian.answer_ms"}
    assert natural["meridian.ttfat_ms"] == told[0]["ttfat_ms"]
    assert all(span["gen_ai.usage.completion_tokens"] for span in spans)
    thoughts = collector.wait_for("think", thought + 4)[thought:]
    answers = collector.wait_for("answer", answered + 3)[answered:]
    for span, thought, answer in zip(spans[:3], thoughts[:3], answers, strict=True):
        assert thought["parent"] == answer["parent"] == span["id"]
        assert span["begin_s"] < thought["begin_s"] <= thought["end_s"] <= answer["begin_s"]
        assert answer["end_s"] <= span["end_s"]
        assert thought["meridian.begin_token"] == 0
        assert thought["meridian.boundary_token"] + 1 == span["meridian.think_tokens"]
        assert answer["meridian.begin_token"] == span["meridian.think_tokens"]
        assert thought["meridian.exit_reason"] == span["meridian.exit_reason"]
        assert thought["meridian.preemptions"] == answer["meridian.preemptions"] == 0
    (cut_thought,) = thoughts[3:]
    assert cut_thought["meridian.tokens"] == 3
    assert "meridian.boundary_token" not in cut_thought
    assert "meridian.exit_reason" not in cut_thought
