"""The workloads against what they are fitted to."""

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meridian_patch.bench.simulated.lengths import SERVEGEN_CLIENTS, Clients, draw_arrivals
from meridian_patch.bench.simulated.trace import read_trace, write_trace
from meridian_patch.bench.simulated.workloads import (
    CONTEXT_TOKENS,
    TURNS_SYSTEMS,
    WORKLOADS,
    draw_trace,
)
from meridian_patch.errors import BenchError

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "workloads.md"
LARGE = 20_000
TURNS = ("s-turns", "s-turns-kept", "s-turns-loop", "s-turns-plain")
SESSIONS = {*TURNS, "s-agent"}
LENGTHS = ("prompt_tokens", "think_tokens", "answer_tokens")
# ServeGen's DeepSeek-R1 requests, recomputed from the release: p10, p25, p50, p75, p90, p95, p99.
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
PUBLISHED = {
    "input": (18, 41, 208, 482, 2092, 6714, 23423),
    "output": (287, 427, 792, 1499, 3432, 5701, 12607),
    "share": (0.361, 0.501, 0.764, 0.896, 0.954, 0.974, 0.992),
    "think": (183, 294, 478, 977, 2684, 4689, 11199),
    "answer": (25, 74, 206, 513, 913, 1165, 2804),
}
# Prompt, think and answer tokens of the first three requests.
PUBLISHED_SEED_11 = [1565, 682, 437, 246, 461, 139, 45, 316, 39]
PUBLISHED_MEANS = {"input": 1268, "output": 1527, "share": 0.702, "think": 1136, "answer": 389}


def columns(trace):
    return (np.array([getattr(request, name) for request in trace]) for name in LENGTHS)


@functools.cache
def sample(workload, seed=0):
    return draw_trace(workload, 3_000 if workload in SESSIONS else LARGE, 1.0, seed)


@pytest.fixture(scope="module")
def prod():
    """Lengths of many s-prod requests, as they are drawn."""
    prompts, thinks, answers = columns(draw_trace("s-prod", 100_000, 1.0, 5))
    outputs = thinks + answers
    shares = thinks / outputs
    return {
        "input": prompts,
        "output": outputs,
        "share": shares,
        "think": thinks,
        "answer": answers,
    }


def rank_correlation(first, second):
    return np.corrcoef(first.argsort().argsort(), second.argsort().argsort())[0, 1]


@pytest.mark.parametrize(
    ("figure", "error"), [("output", 0.07), ("share", 0.03), ("think", 0.08), ("answer", 0.13)]
)
def test_prod_quantiles(prod, figure, error):
    """All published quantiles and the mean, within the error of the fit and of the sample."""
    drawn = np.quantile(prod[figure], QUANTILES)
    assert drawn == pytest.approx(PUBLISHED[figure], rel=error)
    assert prod[figure].mean() == pytest.approx(PUBLISHED_MEANS[figure], rel=0.03)


def test_prod_inputs(prod):
    """The body is met; of the tail the fit itself says that p90 and p95 are rough."""
    drawn = np.quantile(prod["input"], QUANTILES)
    assert drawn[:4] == pytest.approx(PUBLISHED["input"][:4], rel=0.08)
    assert drawn[4:] == pytest.approx(PUBLISHED["input"][4:], rel=0.22)


def test_prod_tails(prod):
    """What matters to a scheduler: who thinks for long, and who hardly answers."""
    thinks, outputs = prod["think"], prod["output"]
    assert (thinks > 2048).mean() == pytest.approx(0.125, abs=0.01)
    assert (thinks > 5000).mean() == pytest.approx(0.045, abs=0.005)
    long_part = outputs[thinks > 5000].sum() / outputs.sum()
    assert long_part == pytest.approx(0.295, abs=0.025)
    assert (prod["answer"] < 64).mean() == pytest.approx(0.22, abs=0.03)
    assert (prod["answer"] > 1024).mean() == pytest.approx(0.07, abs=0.015)


def test_prod_share_depends_on_length(prod):
    bins = np.searchsorted((500, 1000, 2000, 5000), prod["output"], side="right")
    means = [prod["share"][bins == number].mean() for number in range(5)]
    assert means == pytest.approx((0.751, 0.690, 0.600, 0.769, 0.832), abs=0.02)


def test_prod_fields_are_drawn_apart(prod):
    """Inputs hang together with outputs as published, and with nothing else."""
    assert rank_correlation(prod["input"], prod["output"]) == pytest.approx(-0.38, abs=0.02)
    assert rank_correlation(prod["output"], prod["share"]) == pytest.approx(-0.07, abs=0.1)
    assert abs(rank_correlation(prod["input"], prod["share"])) < 0.05


def test_chat_hard_and_plain_are_as_described():
    _, thinks, answers = columns(sample("s-chat"))
    assert np.median(thinks) == pytest.approx(500, rel=0.05)
    assert answers.mean() == pytest.approx(690, rel=0.02)
    _, thinks, _ = columns(sample("s-hard"))
    assert thinks.mean() == pytest.approx(4000, rel=0.02)
    assert np.quantile(thinks, 0.99) > 20_000
    assert thinks.max() == 32_000
    _, thinks, _ = columns(sample("s-budget"))
    assert (thinks == thinks.max()).mean() == pytest.approx(0.58, abs=0.02)
    _, thinks, answers = columns(sample("s-plain"))
    assert not thinks.any()
    assert answers.mean() == pytest.approx(211, rel=0.02)
    assert np.quantile(answers, (0.5, 0.99)) == pytest.approx((129, 601), rel=0.03)


def test_a_fifth_of_mixed_is_long():
    """Short requests are those of s-prod; nothing outgrows the context."""
    prompts, thinks, answers = columns(sample("s-mixed"))
    is_long = prompts >= 16_384
    # s-prod has 1.6 % of such prompts itself.
    assert is_long.mean() == pytest.approx(0.2 + 0.8 * 0.016, abs=0.01)
    assert np.median(prompts[is_long]) == pytest.approx(32_768, rel=0.05)
    assert (prompts + thinks + answers).max() == CONTEXT_TOKENS


@pytest.mark.parametrize("workload", TURNS)
def test_conversations(workload):
    """2 to 8 user turns, 12 system prompts, tool results only in loops, bounded contexts."""
    sessions = {}
    for request in sample(workload)[:2000]:
        sessions.setdefault(request.session, []).append(request)
    *whole, _cut = sessions.values()
    turns = [sum(not request.is_tool_result for request in session) for session in whole]
    assert set(turns) <= set(range(1, 9))
    assert set(range(2, 8)) <= set(turns)
    assert len({session[0].system for session in whole}) == TURNS_SYSTEMS
    assert any(r.is_tool_result for s in whole for r in s) == (workload == "s-turns-loop")
    assert any(r.think_tokens for s in whole for r in s) == (workload != "s-turns-plain")
    for session in whole:
        assert sum(sum(getattr(r, name) for name in LENGTHS) for r in session) <= CONTEXT_TOKENS
        assert [r.pause_s > 0 for r in session] == [r.turn > 0 for r in session]
        assert 900 <= session[0].shared_tokens <= 1500


def test_histories_share_the_rest_of_a_conversation():
    """The same seed: kept thoughts change nothing, plain drops them."""
    stripped, kept, plain = (draw_trace(name, 60, 1.0, 7) for name in (TURNS[0], *TURNS[1::2]))
    assert kept == stripped
    assert plain == [replace(request, think_tokens=0) for request in stripped]


def test_a_seed_draws_the_conversations_of_published_figures():
    """What stands in pages of figures can be compared with new replays of the same seeds."""
    drawn = [getattr(r, n) for r in draw_trace("s-turns", 3, 1.0, 11) for n in LENGTHS]
    assert drawn == PUBLISHED_SEED_11


def test_agents_loop():
    """Most requests bring a tool's result; medians as in TraceLab; contexts stay in bounds."""
    trace = sample("s-agent")
    results = [request for request in trace if request.is_tool_result]
    assert 0.8 < len(results) / len(trace) < 0.95
    _, thinks, answers = columns(trace)
    new = [request.prompt_tokens - request.shared_tokens for request in trace]
    assert np.median(new) == pytest.approx(860, rel=0.1)
    assert np.median(thinks + answers) == pytest.approx(250, rel=0.1)
    contexts = Counter()
    for request in trace:
        contexts[request.session] += (
            request.prompt_tokens + request.think_tokens + request.answer_tokens
        )
    assert 0.8 * CONTEXT_TOKENS < max(contexts.values()) <= CONTEXT_TOKENS
    assert max(Counter(request.session for request in trace).values()) > 30


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_trace_is_valid_and_depends_on_its_seed_alone(workload, tmp_path):
    trace = draw_trace(workload, 101, 2.0, 3)
    assert len(trace) == 101
    assert trace == draw_trace(workload, 101, 2.0, 3)
    assert trace != draw_trace(workload, 101, 2.0, 4)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
    arrivals = [request.arrival_s for request in trace if request.arrival_s is not None]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(101 / 2.0)


@settings(deadline=None, max_examples=30)
@given(
    workload=st.sampled_from(list(WORKLOADS)),
    rates=st.tuples(*[st.floats(1e-3, 1e3)] * 2),
    seed=st.integers(0, 10**9),
)
def test_the_rate_changes_arrivals_alone(workload, rates, seed):
    """Another rate stretches the same arrivals."""
    slow, fast = (draw_trace(workload, 20, rate, seed) for rate in rates)
    for one, other in zip(slow, fast, strict=True):
        assert {**vars(one), "arrival_s": 0} == {**vars(other), "arrival_s": 0}
        if one.arrival_s is not None:
            assert one.arrival_s * rates[0] == pytest.approx(other.arrival_s * rates[1])


@pytest.mark.parametrize("cv", [0.5, 1.0, 1.9, 5.6])
def test_gaps_have_their_cv(cv):
    gaps = np.diff(draw_arrivals(np.random.default_rng(1), 100_000, (Clients(1, 1.0, cv),)))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_clients_are_those_of_servegen():
    """73 clients; shares of the largest; CVs weighted by rate."""
    shares = sorted((c.share for c in SERVEGEN_CLIENTS for _ in range(c.count)), reverse=True)
    assert len(shares) == 73
    assert sum(shares) == pytest.approx(1, abs=0.001)
    assert [sum(shares[:top]) for top in (1, 5, 10)] == pytest.approx(
        (0.286, 0.525, 0.677), abs=0.01
    )
    mean = sum(c.count * c.share * c.cv for c in SERVEGEN_CLIENTS)
    assert mean == pytest.approx(2.28, abs=0.05)


def test_bursts_come_at_any_time():
    """Counts vary as they must, in the first tenth of a trace as in the last: no warm-up."""
    counts = np.array(
        [
            np.histogram(
                draw_arrivals(np.random.default_rng(seed), 1000, SERVEGEN_CLIENTS),
                bins=10,
                range=(0, 1000),
            )[0]
            for seed in range(60)
        ]
    )
    assert counts.mean(axis=0) == pytest.approx(100, rel=0.15)
    # Poisson would have 1; the clients' CVs squared have a weighted mean of 8.
    assert 3 < counts.var() / counts.mean() < 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("s-best", 1, 1.0, 1), "unknown workload 's-best'; known: s-prod, s-chat, s-hard"),
        (("s-prod", 0, 1.0, 1), "requests is 0 and seed is 1, expected 1 or more"),
        (("s-prod", 1, 1.0, -1), "seed is -1, expected 1 or more and 0 or more"),
        (("s-prod", 1, 0.0, 1), "rate_per_s is 0.0, expected a number above 0"),
        (("s-prod", 1, float("nan"), 1), "rate_per_s is nan, expected a number above 0"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, words):
    with pytest.raises(BenchError, match=words):
        draw_trace(*arguments)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_page_has_the_drawn_figures(workload):
    """A changed fit needs a changed row in docs/workloads.md: this one."""
    cells = []
    for column in columns(sample(workload)):
        median, p99 = np.quantile(column, (0.5, 0.99))
        cells.append(f"{column.mean():,.0f} / {median:,.0f} / {p99:,.0f}")
    row = f"| `{workload}` | {' | '.join(cells)} |"
    assert row in PAGE.read_text().splitlines(), row
