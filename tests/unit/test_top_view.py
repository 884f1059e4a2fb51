"""What `meridian top` makes of two scrapes, recorded on a served model or written here."""

import dataclasses
import io
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from meridian_patch.operate.http_client import Reply
from meridian_patch.operate.scrape import ScrapeError, parse
from meridian_patch.operate.top import recording
from meridian_patch.operate.top.render import render
from meridian_patch.operate.top.verdict import Load, judge
from meridian_patch.operate.top.view import view
from meridian_patch.operate.top.window import Quantile, Window, quantile

RECORDINGS = Path(__file__).parents[1] / "support" / "recordings"
INFINITE = float("inf")
CALM = Load(
    window_s=2.0,
    is_patched=True,
    requests={"prefill": 1.0, "think": 6.0, "answer": 2.0},
    running=9.0,
    waiting=0.0,
    kv_usage=0.4,
    preemptions={"prefill": 0.0, "think": 0.0, "answer": 0.0},
    preempted=0.0,
    prompt_share=0.1,
    fallbacks={"exception": 0.0, "slow": 0.0},
    parts_off={"the policy": 0.0},
)


@pytest.fixture(scope="module")
def scrapes():
    return list(recording.read(RECORDINGS / "seats.txt"))


def counter(value, name="vllm:generation_tokens", engine="0"):
    return f'# TYPE {name} counter\n{name}_total{{engine="{engine}"}} {value}\n'


def window(before, after, seconds=2.0):
    return Window(parse(before, 0.0), parse(after, seconds))


def test_a_recorded_window(scrapes):
    """The numbers are those that stand on the recording's two pages."""
    shown = view(scrapes[0], scrapes[1])
    pages = (RECORDINGS / "seats.txt").read_text().split("# meridian scrape at ")[1:]

    def rise(line):
        values = [float(re.search(rf"^{line} (.*)$", page, re.MULTILINE)[1]) for page in pages]
        return values[1] - values[0]

    labels = 'engine="0",model_name="m"'
    assert shown.window_s == pytest.approx(1.0, abs=0.1)
    assert shown.model == "m"
    assert not shown.is_reset
    assert (shown.load.running, shown.load.waiting) == (8.0, 66.0)
    assert dict(shown.load.requests) == {"prefill": 67.0, "think": 6.0, "answer": 2.0}
    tokens = rise(f"vllm:generation_tokens_total{{{labels}}}")
    assert shown.generated_per_s == pytest.approx(tokens / shown.window_s)
    natural = f'meridian_thoughts_ended_total{{{labels},reason="natural"}}'
    assert shown.exits["natural"] == rise(natural) > 0
    first = shown.latencies["first answer"]
    name, labels = "meridian_time_to_first_answer_token_seconds", f'{labels},thought="yes"'
    assert first.count == rise(f"{name}_count{{{labels}}}") > 0
    assert first.mean_s * first.count == pytest.approx(rise(f"{name}_sum{{{labels}}}"))
    assert first.p50.seconds <= first.p95.seconds


@pytest.mark.parametrize(
    ("load", "bottleneck", "words"),
    (
        (
            "seats",
            "seats",
            "36% full; 8 run: of all 75 requests 6 think",
        ),
        ("thinking", "think", "1 preempted in 1 s; KV cache is 94% full"),
        ("answering", "answer", "2 answers were preempted in 1 s"),
        ("prompts", "prefill", "of the tokens computed are of prompts"),
        ("idle", "none", "no request"),
    ),
)
def test_loads_of_a_real_server_are_told_apart(load, bottleneck, words):
    """Short requests, thoughts without an end, long answers, long prompts, none: all recorded."""
    first, second, *_ = recording.read(RECORDINGS / f"{load}.txt")
    verdict = view(first, second).verdict
    assert verdict.bottleneck == bottleneck
    assert words in verdict.numbers


@pytest.mark.parametrize("file", sorted(RECORDINGS.iterdir()), ids=lambda file: file.stem)
def test_every_recorded_window_is_80_columns_and_plain_json(file):
    """Drawn and as JSON, it says the same."""
    for before, after in pairwise(recording.read(file)):
        shown = view(before, after)
        stream = io.StringIO()
        Console(file=stream, width=80, highlight=False).print(render(shown, "http://host:8000"))
        text = stream.getvalue()
        assert max(map(len, text.splitlines())) <= 80
        assert len(text.splitlines()) <= 23
        assert "\x1b" not in text
        told = json.loads(json.dumps(shown.as_dict()))
        assert f"bottleneck: {told['verdict']['bottleneck']}" in text
        assert " ".join(told["verdict"]["change"].split()) in " ".join(text.split())


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


def test_the_fullest_of_several_engines_speaks_for_the_cache():
    """Their mean would say 55%, though one of them preempts."""
    name = "vllm:kv_cache_usage_perc"
    page = f'# TYPE {name} gauge\n{name}{{engine="0"}} 1.0\n{name}{{engine="1"}} 0.1\n'
    assert view(parse(page, 0.0), parse(page, 1.0)).load.kv_usage == 1.0


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
    text = (RECORDINGS / "seats.txt").read_text()
    page = text.split("# meridian scrape at ")[2].partition(" s\n")[2]
    for end in range(1, len(page), 1499):
        try:
            view(scrapes[0], parse(page[:end], 9.0))
        except ScrapeError:
            continue


def test_a_bucket_whose_bound_is_no_number():
    """A proxy, or another program, may write anything there."""
    name = "vllm:e2e_request_latency_seconds"
    page = f'{name}_bucket{{le="x"}} 2\n{name}_count 2\n{name}_sum 2\n'
    with pytest.raises(ScrapeError, match=f"a bound of histogram {name} is no number"):
        view(parse("vllm:x 1\n", 0.0), parse(page, 1.0))


def test_what_a_server_sends_cannot_steer_the_terminal():
    """Neither a label nor a line that cannot be read."""
    page = 'vllm:num_requests_running{model_name="\x1b[2Jm"} 1\n'
    assert view(parse(page, 0.0), parse(page, 1.0)).model == "?[2Jm"
    with pytest.raises(ScrapeError) as refused:
        parse('vllm:x{a="\x1b[2J} 1\n', 0.0)
    assert "\x1b" not in str(refused.value)
    assert Reply(500, "\x1b[2J no").begin == "HTTP 500: ?[2J no"


def histogram(name, counts, **labels):
    """A page's histogram with as many values at each bound, not cumulative."""
    said = "".join(f'{label}="{value}",' for label, value in labels.items())
    total, lines = 0, []
    for bound, count in counts.items():
        total += count
        lines.append(f'{name}_bucket{{{said}le="{bound}"}} {total}')
    seconds = sum(float(bound) * count for bound, count in counts.items() if bound != "+Inf")
    own = f"{{{said}}}"
    lines += [f"{name}_count{own} {total}", f"{name}_sum{own} {seconds}"]
    return "".join(f"{line}\n" for line in lines)


def page(first=0, stalls=0, running=2):
    """A patched server's: answers that began, and gaps in answers of half a second."""
    gaps = "meridian_inter_token_seconds"
    return (
        f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 7\n"
        'meridian_requests{phase="think"} 6\nmeridian_requests{phase="answer"} 3\n'
        + histogram("meridian_time_to_first_answer_token_seconds", {"4.0": first, "+Inf": 0})
        + histogram(gaps, {"0.25": 100 * first, "0.5": stalls, "+Inf": 0}, phase="answer")
        + histogram(gaps, {"0.25": 0, "0.5": 9 * first, "+Inf": 0}, phase="think")
    )


def drawn(shown, past=()):
    stream = io.StringIO()
    Console(file=stream, width=80, highlight=False).print(render(shown, "x", past))
    return stream.getvalue().splitlines()


def test_what_readers_wait_for_comes_from_our_own_metrics():
    """First answers, gaps by phase, and stalls, which thoughts have too."""
    shown = view(parse(page(), 0.0), parse(page(first=5, stalls=3), 2.0))
    assert shown.latencies["first answer"].count == 5
    assert shown.latencies["first answer"].mean_s == 4.0
    assert shown.latencies["answer gap"].num_stalls == 3
    assert shown.latencies["think gap"].num_stalls == 45
    assert "next token" not in shown.latencies
    row = next(line for line in drawn(shown) if line.startswith("answer gap"))
    assert row.split()[-2:] == ["3", "503"]


def test_waiting_requests_are_not_counted_with_those_that_run():
    """Nine are in a phase and two run."""
    text = " ".join(drawn(view(parse(page(), 0.0), parse(page(), 2.0))))
    assert "7 wait though the KV use unknown; 2 run: of all 9 requests 6 think" in text
    assert "think 6   answer 3   waiting ones included" in text


def test_the_last_minute_is_drawn():
    """The newest on the right, to the highest."""
    pages = [parse(page(first=n, stalls=n * n, running=n), 2.0 * n) for n in range(5)]
    past = [view(before, after) for before, after in pairwise(pages)]
    lines = drawn(past[-1], past)
    assert next(line for line in lines if line.startswith("last 8 s"))
    assert next(line for line in lines if line.startswith("running")).split()[1:] == ["▃▅▆█", "4"]
    stalls = next(line for line in lines if line.startswith("answer stalls")).split()
    assert stalls[2:] == ["▂▄▆█", "7"]
    assert max(map(len, lines)) <= 80
    assert not any(line.startswith("last ") for line in drawn(past[-1], past[-1:]))


def test_the_verdict_is_seen_on_a_low_terminal(scrapes):
    """Of a screen that does not fit, rich shows the upper lines."""
    stream = io.StringIO()
    shown = view(scrapes[0], scrapes[1])
    Console(file=stream, width=80, highlight=False).print(render(shown, "x"))
    assert "bottleneck: seats" in stream.getvalue().splitlines()[1]


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
        ({}, "none", "of all 9 requests 6 think, 2 answer, 1 have no token yet", ""),
        ({"running": 0.0, "requests": {}}, "none", "no request", ""),
        (
            {"waiting": 12.0, "kv_usage": 0.97, "requests": {"think": 14.0, "answer": 3.0}},
            "think",
            "KV cache is 97% full and 12 wait; of all 17 requests 14 think",
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
            {"kv_usage": 0.7, "preempted": 5.0, "waiting": 9.0},
            "think",
            "5 preempted in 2 s",
            "exit.mode=enforce",
        ),
        (
            {"waiting": 9.0, "running": 1.0, "prompt_share": 0.97},
            "prefill",
            "97% of the tokens computed are of prompts",
            "--max-num-batched-tokens",
        ),
        (
            {"waiting": 2.0, "running": 9.0, "requests": {"prefill": 8.0, "think": 3.0}},
            "prefill",
            "6 of 9 running requests compute their prompts",
            "--max-num-batched-tokens",
        ),
        ({"waiting": 4.0}, "seats", "4 wait though the KV cache is 40% full", "--max-num-seqs"),
        (
            {"parts_off": {"early exit": 1.0}},
            "plug-in",
            "off after failures: early exit",
            "report it",
        ),
        ({"fallbacks": {"exception": 9.0}}, "plug-in", "9 steps failed", "report it"),
        ({"running": None}, "unknown", "does not say", "--disable-log-stats"),
        (
            {"is_patched": False, "requests": {}, "preemptions": {}, "preempted": 3.0},
            "unknown",
            "3 preempted in 2 s; KV cache is 40% full and 0 wait; phases unknown",
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
