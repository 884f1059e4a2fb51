"""What `meridian top` makes of two scrapes, recorded on a served model or written here."""

import dataclasses
import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from meridian_patch.operate.scrape import ScrapeError, parse
from meridian_patch.operate.top import recording
from meridian_patch.operate.top.render import render
from meridian_patch.operate.top.verdict import Load, judge
from meridian_patch.operate.top.view import view
from meridian_patch.operate.top.window import Quantile, Window, quantile

RECORDING = Path(__file__).parents[1] / "support" / "recordings" / "demo_load.txt"
INFINITE = float("inf")
CALM = Load(
    window_s=2.0,
    is_patched=True,
    requests={"prefill": 1.0, "think": 6.0, "answer": 2.0},
    running=9.0,
    waiting=0.0,
    kv_usage=0.4,
    preemptions={"prefill": 0.0, "think": 0.0, "answer": 0.0},
    fallbacks={"exception": 0.0, "slow": 0.0},
    parts_off={"the policy": 0.0},
)


@pytest.fixture(scope="module")
def scrapes():
    return list(recording.read(RECORDING))


def counter(value, name="vllm:generation_tokens", engine="0"):
    return f'# TYPE {name} counter\n{name}_total{{engine="{engine}"}} {value}\n'


def window(before, after, seconds=2.0):
    return Window(parse(before, 0.0), parse(after, seconds))


def test_a_recorded_window(scrapes):
    """The numbers are those of the recording's two pages, by hand."""
    shown = view(scrapes[0], scrapes[1])
    assert shown.window_s == 1.0
    assert shown.model == "m"
    assert not shown.is_reset
    assert (shown.load.running, shown.load.waiting) == (8.0, 8.0)
    assert dict(shown.load.requests) == {"prefill": 7.0, "think": 4.0, "answer": 4.0}
    assert shown.generated_per_s == pytest.approx(1239.0)
    assert shown.exits["natural"] == 17.0
    assert shown.evictions["think_complete"] == 40.0
    first = shown.latencies["first token"]
    assert first.count == 18.0
    assert 0.3 < first.mean_s < 0.6
    assert first.p50.seconds <= first.p95.seconds


def test_every_recorded_window_is_80_columns_and_plain_json(scrapes):
    """Drawn and as JSON, it says the same bottleneck."""
    for before, after in pairwise(scrapes):
        shown = view(before, after)
        stream = io.StringIO()
        Console(file=stream, width=80, highlight=False).print(render(shown, "http://host:8000"))
        text = stream.getvalue()
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b" not in text
        assert "8 wait though the KV cache is" in text
        assert "change: raise --max-num-seqs" in text
        told = json.loads(json.dumps(shown.as_dict()))
        assert told["verdict"]["bottleneck"] == "seats"
        assert told["load"]["waiting"] == 8.0


def test_a_longer_window_counts_the_same(scrapes):
    """Counts of windows add up."""
    whole = Window(scrapes[0], scrapes[-1])
    name = "vllm:generation_tokens_total"
    parts = [Window(a, b).count(name) for a, b in pairwise(scrapes)]
    assert sum(parts) == whole.count(name)


def test_rates_and_several_engines():
    two = counter(10) + counter(30, engine="1").partition("\n")[2]
    later = counter(20) + counter(70, engine="1").partition("\n")[2]
    seen = window(two, later)
    assert seen.count("vllm:generation_tokens_total") == 50.0
    assert seen.count("vllm:generation_tokens_total", engine="1") == 40.0
    assert seen.rate("vllm:generation_tokens_total") == 25.0
    assert not seen.is_reset


def test_a_reset_counts_what_the_new_server_did():
    """No negative rate, and the screen says so."""
    seen = window(counter(1000), counter(30))
    assert seen.is_reset
    assert seen.count("vllm:generation_tokens_total") == 30.0
    shown = view(parse(counter(1000), 0.0), parse(counter(30), 1.0))
    stream = io.StringIO()
    Console(file=stream, width=80).print(render(shown, "x"))
    assert "the server was restarted" in stream.getvalue()


def test_a_page_that_tells_little():
    """What is not told is shown as unknown, not as 0."""
    shown = view(parse(counter(1), 0.0), parse(counter(2), 1.0))
    assert shown.load.running is None
    assert shown.hit_share is None
    assert shown.verdict.bottleneck == "unknown"
    assert "--disable-log-stats" in shown.verdict.change


def test_no_time_between_scrapes():
    assert window(counter(1), counter(2), seconds=0.0).rate("vllm:generation_tokens_total") is None


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("", "empty"),
        (counter(12)[:-3], "cut off"),
        ("<html>\n<body class='x'>hello</body>\n", "no page of metrics"),
        ("# just a comment\n", "no samples"),
    ),
)
def test_half_a_scrape_and_other_pages(text, message):
    """One sentence, whatever is on the page."""
    with pytest.raises(ScrapeError, match=message):
        parse(text, 0.0)


def test_every_cut_of_a_recorded_page_is_whole_or_refused(scrapes):
    """Wherever a reply was cut off, there is a view or a sentence."""
    page = RECORDING.read_text().split("# meridian scrape at 2.000 s\n")[1].partition("# mer")[0]
    for end in range(1, len(page), 1499):
        try:
            view(scrapes[0], parse(page[:end], 2.0))
        except ScrapeError:
            continue


def test_another_programs_metrics():
    page = parse("# TYPE go_threads gauge\ngo_threads 8\n", 0.0)
    with pytest.raises(ScrapeError, match="another program"):
        view(page, page)


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    (
        ([(1.0, 0.0), (2.0, 10.0), (INFINITE, 10.0)], 0.5, Quantile(1.5)),
        ([(1.0, 5.0), (2.0, 10.0), (INFINITE, 10.0)], 0.75, Quantile(1.5)),
        ([(1.0, 9.0), (2.0, 10.0), (INFINITE, 10.0)], 0.5, Quantile(1.0, "below")),
        ([(1.0, 0.0), (2.0, 1.0), (INFINITE, 10.0)], 0.5, Quantile(2.0, "above")),
        ([(1.0, 0.0), (2.0, 4.0), (3.0, 4.0), (INFINITE, 4.0)], 1.0, Quantile(2.0)),
    ),
)
def test_quantiles(buckets, share, expected):
    """Within a bucket, in the first one, and beyond the last."""
    assert quantile(buckets, share) == expected


def loaded(**changes):
    return judge(dataclasses.replace(CALM, **changes))


@pytest.mark.parametrize(
    ("changes", "bottleneck", "numbers", "change"),
    (
        ({}, "none", "6 think, 2 answer, 1 compute prompts", ""),
        ({"running": 0.0, "requests": {}}, "none", "no request", ""),
        (
            {"waiting": 12.0, "kv_usage": 0.97, "requests": {"think": 14.0, "answer": 3.0}},
            "think",
            "KV cache is 97% full and 12 wait; 14 think",
            "exit.max_think_tokens",
        ),
        (
            {"waiting": 12.0, "kv_usage": 0.97, "requests": {"think": 1.0, "answer": 9.0}},
            "answer",
            "9 answer",
            "more memory",
        ),
        (
            {"kv_usage": 0.99, "preemptions": {"answer": 3.0}},
            "answer",
            "3 answers were preempted in 2 s",
            "lower --max-num-seqs",
        ),
        (
            {"kv_usage": 0.99, "preemptions": {"think": 5.0}},
            "think",
            "5 preempted in 2 s",
            "exit.mode=enforce",
        ),
        (
            {"waiting": 2.0, "running": 9.0, "requests": {"prefill": 8.0, "think": 3.0}},
            "prefill",
            "6 of 9 running requests compute their prompts",
            "--max-num-batched-tokens",
        ),
        ({"waiting": 4.0}, "seats", "4 wait though the KV cache is 40% full", "--max-num-seqs"),
        ({"parts_off": {"early exit": 1.0}}, "plug-in", "early exit failed", "report it"),
        ({"fallbacks": {"exception": 9.0}}, "plug-in", "9 steps failed", "report it"),
        ({"running": None}, "unknown", "does not say", "--disable-log-stats"),
        (
            {"is_patched": False, "requests": {}, "waiting": 5.0, "kv_usage": 0.95},
            "unknown",
            "phases unknown",
            "serve it patched",
        ),
    ),
)
def test_the_verdict_names_phase_numbers_and_change(changes, bottleneck, numbers, change):
    """Each rule with a load that it alone fits."""
    verdict = loaded(**changes)
    assert verdict.bottleneck == bottleneck
    assert numbers in verdict.numbers
    assert change in verdict.change
    assert bool(verdict.change) == bool(change)


def test_a_slow_decision_is_no_bottleneck():
    """It costs one step its order; the doctor looks at their share."""
    assert loaded(fallbacks={"slow": 3.0}).bottleneck == "none"
