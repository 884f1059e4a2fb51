"""Figures of replays: each metric, how arms are paired, and what may stand in one table."""

from math import inf

import numpy as np
import pytest
from replay_runs import replay_run, requests

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.figure_table import GOODPUT, HARM
from meridian_patch.bench.simulated.arms import (
    arm_settings,
    choose_arms,
    named_arm,
    own_arm,
)
from meridian_patch.bench.simulated.grid import RunKey, SweepPoint
from meridian_patch.bench.simulated.metrics import (
    AloneTimes,
    StepTimes,
    answer_gaps,
    goodput,
    harm_p99,
    per_request,
    reading_quality,
    run_figures,
    steady_span,
    weighted_quantile,
)
from meridian_patch.bench.simulated.rows import ROWS
from meridian_patch.bench.simulated.summary import (
    Limits,
    by_point,
    point_cells,
    summarise,
)
from meridian_patch.bench.simulated.trace import History
from meridian_patch.bench.statistics import bootstrap_picks, plain_interval, ratio_of_sums
from meridian_patch.config.load import load_config
from meridian_patch.errors import BenchError
from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.profiles import choose_rules
from meridian_patch.replay.types import ReplayRecord, ReplayRequest

POINT = SweepPoint("s-prod", 0.25, 4096, 0.9, 2.0)


def seconds(work):
    return 1.0 if work.prefill_tokens else 0.1 + 0.001 * work.context_tokens


def record(name, arrival_s, token_s, answer_start, prompt=10):
    tokens = [0] * len(token_s)
    request = ReplayRequest(name, [0] * prompt, tokens, answer_start)
    made = ReplayRecord(request, arrival_s, admitted_s=arrival_s)
    made.token_s = list(token_s)
    made.finish_reason = "stop"
    return made


def test_times_of_one_request():
    """Every clock of a request with two think tokens, a boundary and three answer tokens."""
    made = record("a", 1.0, [3.0, 4.0, 6.0, 6.5, 6.6, 7.0], 3)
    made.longest_pause_s = 2.5
    row = per_request([made], AloneTimes(seconds, 4))
    alone = 3 * 1.0 + sum(0.1 + 0.001 * (10 + token) for token in (1, 2, 3))
    assert row.ids == ("a",)
    assert row.ttft_s[0] == 2.0
    assert row.ttfat_s[0] == 5.5
    assert row.slowdown[0] == pytest.approx(5.5 / alone)
    assert row.ttot_s[0] == 0.5
    assert row.think_tpot_s[0] == 1.5
    assert row.e2e_s[0] == 6.0
    assert row.first_wait_s[0] == 0.0
    assert row.longest_pause_s[0] == 2.5
    assert row.answer_itl_p99_s[0] == pytest.approx(np.quantile([0.1, 0.4], 0.99))
    assert answer_gaps([made]) == pytest.approx([0.1, 0.4])


def test_a_request_without_a_thought_has_no_think_clocks():
    row = per_request([record("a", 0.0, [1.0, 2.0], 0)], AloneTimes(seconds, 4))
    assert np.isnan(row.ttot_s[0])
    assert np.isnan(row.think_tpot_s[0])
    assert row.ttfat_s[0] == row.ttft_s[0] == 1.0


def test_alone_times_do_not_depend_on_what_was_asked_before():
    """The table of decode steps grows in pieces."""
    grown = AloneTimes(seconds, 100)
    asked = [(50, 3), (900, 20), (10, 700), (50, 3)]
    assert [grown.seconds(*a) for a in asked] == pytest.approx(
        [AloneTimes(seconds, 100).seconds(*a) for a in asked]
    )


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        ([5.0], 1.0),
        ([0.0, 0.05, 0.10], 1.0),
        ([0.0, 0.001, 0.002], 1.0),
        # Nothing but the first token is read for a second: 1 token-second of 1 + 0.95.
        ([0.0, 1.0], 1 / 1.95),
        # Delivered ahead of the reader: a late token that is not yet due costs nothing.
        ([0.0, 0.01, 0.02, 0.15], 1.0),
    ],
)
def test_reading_quality(stamps, expected):
    assert reading_quality(stamps) == pytest.approx(expected)


def test_reading_quality_counts_lateness_once_per_token_that_it_delays():
    """After a pause the reader goes on at its pace, behind for good."""
    late, hurried = [0.0, 1.0, 1.05, 1.10], [0.0, 1.0, 1.0, 1.0]
    assert reading_quality(late) == pytest.approx(reading_quality(hurried))
    assert reading_quality(late) < reading_quality([0.0, 0.05, 0.1, 0.3]) < 1


def test_run_figures():
    """Pooled gaps, stalls, phases, and rates over the right spans."""
    first = record("a", 0.0, [1.0, 2.0, 2.1, 2.4], 2)
    second = record("b", 1.0, [2.0, 3.0, 3.1], 1)
    first.preemptions[Phase.THINK] = 2
    second.preemptions[Phase.ANSWER] = 1
    second.recomputed_tokens[Phase.ANSWER] = 30
    steps = StepTimes(
        np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.1, 0.2]), np.array([9, 0, 0]), np.full(3, 0.5)
    )
    records = [first, second]
    rows = per_request(records, AloneTimes(seconds, 100))
    figures = run_figures(records, rows, answer_gaps(records), steps)
    assert figures["answer_gap_max_s"] == pytest.approx(0.3)
    assert figures["answer_stalls"] == 1
    assert figures["decode_only_step_p99_s"] == pytest.approx(0.199)
    assert figures["answer_gap_max_over_decode_only"] == pytest.approx(0.3 / 0.199)
    assert figures["preemptions"] == 3
    assert figures["preemptions_think"] == 2
    assert figures["preempted_answers"] == figures["preemptions_answer"] == 1
    assert figures["recomputed_tokens"] == figures["recomputed_tokens_answer"] == 30
    assert figures["tokens_per_s"] == pytest.approx(7 / 3.1)
    assert figures["ttft_mean_s"] == 1.0
    assert figures["hit_share"] is figures["missed_tokens"] is None
    assert {row.kind.name for row in ROWS} <= {*figures, HARM, GOODPUT}


def test_prefix_hits_of_a_run():
    """Shares of all prompt tokens, and what is missed of what could be hit."""
    first, second = record("a", 0.0, [1.0, 2.0], 0), record("b", 1.0, [2.0, 3.0], 0, prompt=30)
    second.hit_tokens, second.bound_tokens = 12, 20
    records = [first, second]
    steps = StepTimes(*np.ones((4, 1)))
    rows = per_request(records, AloneTimes(seconds, 100))
    figures = run_figures(records, rows, answer_gaps(records), steps)
    assert (figures["hit_share"], figures["hit_bound_share"]) == (0.3, 0.5)
    assert figures["missed_tokens"] == 8


def test_avoidable_misses_are_over_those_of_stock():
    """The sum over seeds over stock's sum, with its interval; without reuse there is no line."""

    def missing(tokens):
        return replay_run(figures=replay_run().figures | {"missed_tokens": tokens})

    runs = {
        RunKey(POINT, arm, seed): missing(tokens)
        for arm, by_seed in ((STOCK, (200.0, 200.0)), ("tiers", (100.0, 10.0)))
        for seed, tokens in enumerate(by_seed)
    }
    rows = summarise(runs, Limits())
    misses = rows[1].figures["missed_tokens"]
    assert misses.over_stock == pytest.approx(110 / 400)
    assert misses.over_stock_interval == pytest.approx((0.05, 0.5))
    lines = {line.label: line.cells for line in point_cells(rows, is_brief=True)}
    assert lines["avoidable prefix misses"] == ["200", "x 0.275 [0.050..0.500]"]
    assert "prefix hits, %" not in lines
    none = {key: missing(0.0 if key.arm == STOCK else 5.0) for key in runs}
    assert summarise(none, Limits())[1].figures["missed_tokens"].over_stock is None


def test_steady_time_ends_when_the_queue_is_empty_for_good():
    records = [record("a", 0.0, range(100), 0), record("b", 0.0, [50.0], 0)]
    stamps = np.arange(101.0)
    assert steady_span(records, stamps) == (10.0, 80.0)
    records[1].admitted_s = 40.0
    assert steady_span(records, stamps) == (10.0, 40.0)


def test_weighted_quantile():
    """A value counts by how long it lasted."""
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 98.0, 1.0])
    assert weighted_quantile(values, weights, 0.5) == 1.0
    assert weighted_quantile(values, weights, 0.99) == 2.0
    assert weighted_quantile(values, weights, 1.0) == 3.0
    assert weighted_quantile(np.array([]), np.array([]), 0.5) == 0.0


def test_harm_and_goodput():
    stock, ours = requests([1.0, 2.0, 4.0]), requests([1.0, 1.0, 6.0])
    assert harm_p99(ours, stock) == pytest.approx(0.5, abs=0.02)
    served = requests([1.0] * 4, slowdown=[1, 10, 11, 2], itl=[0.1, 0.1, 0.01, 0.2])
    assert goodput(served, 4.0, 10.0, 0.1) == 0.5


def test_arms_are_paired_with_stock_by_seed():
    """Ratios are over the seeds that both have; values over all that the arm has."""
    runs = {
        RunKey(POINT, STOCK, 1): replay_run((2.0, 2.0)),
        RunKey(POINT, STOCK, 2): replay_run((4.0, 4.0)),
        RunKey(POINT, "ours", 1): replay_run((1.0, 3.0)),
        RunKey(POINT, "ours", 3): replay_run((9.0, 9.0)),
    }
    stock, ours = summarise(runs, Limits())
    assert stock.figures["ttfat_mean_s"].value == 3.0
    assert stock.figures["ttfat_mean_s"].over_stock == 1.0
    assert stock.figures["ttfat_mean_s"].interval == (2.0, 4.0)
    assert ours.seeds == (1, 3)
    assert ours.figures["ttfat_mean_s"].value == 5.5
    assert ours.figures["ttfat_mean_s"].over_stock == 1.0
    assert ours.figures["ttfat_mean_s"].over_stock_interval is None
    assert ours.figures[HARM].value == pytest.approx(0.49)
    assert ours.figures["answer_stalls"].over_stock is None
    assert ours.figures[GOODPUT].value == 0.5
    assert list(by_point([stock, ours])) == [POINT]
    harm = next(line for line in point_cells([stock, ours], is_brief=True) if "harm" in line.label)
    assert harm.cells == ["0.0", "49.0"]


def test_the_interval_of_a_ratio_is_that_of_its_resamples():
    """Resampled items are pairs; of one item there is no interval, of nothing below no ratio."""
    above, below = np.array([1.0, 2.0, 5.0]), np.array([2.0, 1.0, 4.0])
    again = [sum(above[pick]) / sum(below[pick]) for pick in bootstrap_picks(3)]
    value, interval = ratio_of_sums(above, below)
    assert value == pytest.approx(8 / 7)
    assert interval == pytest.approx(tuple(np.quantile(again, (0.025, 0.975))))
    assert interval[0] < value < interval[1]
    assert ratio_of_sums(above[:1], below[:1]) == (0.5, None)
    assert ratio_of_sums(above, np.zeros(3)) == ratio_of_sums([]) == (None, None)
    assert ratio_of_sums(above) == ratio_of_sums(above, np.ones(3))
    assert ratio_of_sums(above)[0] == pytest.approx(8 / 3)


def test_a_sample_in_which_only_the_divisor_is_nothing_counts_as_infinite():
    """Leaving it out would call a difference sure that one seed carries alone."""
    below = np.array([8.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    _, (low, high) = ratio_of_sums([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], below)
    assert low < 0.7
    assert high == inf
    assert plain_interval((low, high)) == (low, None)
    assert ratio_of_sums(np.zeros(6), below) == (0.0, (0.0, 0.0))


def test_arms():
    """Named arms are policies, one's own are settings; stock is first and sets nothing."""
    arms = choose_arms("noop,latency,noop", ["mine:policy.level_tokens=2,kv.tiers=false"])
    assert [arm.name for arm in arms] == ["stock", "noop", "latency", "mine"]
    assert not arms[0].settings
    assert arms[3].settings == {
        "MERIDIAN_PATCH_SET_POLICY__LEVEL_TOKENS": "2",
        "MERIDIAN_PATCH_SET_KV__TIERS": "false",
    }
    tiers = own_arm("tiers:policy.order=false,policy.step_cut=false,policy.time_sharing=false")
    config = load_config(arm_settings(tiers, History.TOOL_LOOP)).config
    assert choose_rules(config.policy).are_all_off
    assert config.kv.tiers
    assert config.kv.history == "keep_in_tool_loop"
    assert named_arm("latency").settings == {"MERIDIAN_PATCH_SET_POLICY__NAME": "latency"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine", "expected NAME:KEY=VALUE"),
        ("mine:", "expected NAME:KEY=VALUE"),
        (":a=b", "expected NAME:KEY=VALUE"),
        ("mine:policy.name", "expected NAME:KEY=VALUE"),
        ("stock:policy.name=noop", "use another name"),
        ("mine:policy.speed=2", "arm 'mine': .*policy.speed"),
        ("mine:policy.level_tokens=0", "arm 'mine': .*policy.level_tokens"),
    ],
)
def test_wrong_arms_are_refused_in_one_sentence(text, message):
    with pytest.raises(BenchError, match=message):
        own_arm(text)


def test_unknown_and_double_arms_are_refused():
    with pytest.raises(BenchError, match="unknown arm 'fast'; known: stock, "):
        choose_arms("fast", [])
    with pytest.raises(BenchError, match="two arms called 'noop'"):
        choose_arms("noop", ["noop:kv.tiers=false"])
