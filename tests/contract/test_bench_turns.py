"""The s-turns workload, its figures, and what the command says of wrong options."""

import dataclasses
from itertools import pairwise

import pytest

from meridian_patch import cli
from meridian_patch.bench.simulated.conversation_arms import ARM_WORDS, turns_arm
from meridian_patch.bench.simulated.conversation_figures import (
    SATURATED,
    Place,
    RunKey,
    summarise_turns,
)
from meridian_patch.bench.simulated.conversation_run import TurnsRun
from meridian_patch.bench.simulated.conversations import (
    CONTEXT_TOKENS,
    SYSTEM_PROMPTS,
    History,
    TurnsLoad,
    build_output,
    build_prompt,
    draw_conversations,
    without_pauses,
)
from meridian_patch.bench.statistics import bootstrap_interval
from meridian_patch.config.load import load_config
from meridian_patch.errors import BenchError
from meridian_patch.replay.types import Markers

MARKERS = Markers(256, 257, 259, 260, 261, 262, tool_call=(60, 61), content_ids=256)
THINKING = [History.STRIPPED, History.KEPT, History.TOOL_LOOP]


def draw(history=History.STRIPPED, rate=1.0, seed=3, conversations=12):
    return draw_conversations(TurnsLoad(history, conversations, rate), seed, MARKERS.content_ids)


def prompts(conversation, history):
    indices = range(len(conversation.exchanges))
    return [build_prompt(conversation, index, history, MARKERS) for index in indices]


def shared_tokens(first, second):
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("history", History)
def test_the_same_seed_draws_the_same(history):
    """A workload depends on its seed; seeds share nothing."""
    assert draw(history) == draw(history)
    assert draw(history, seed=3)[0].system != draw(history, seed=4)[0].system


def test_the_rate_stretches_arrivals_and_nothing_else():
    """At another rate the same conversations come in the same rhythm."""
    slow, fast = draw(rate=0.5), draw(rate=2.0)
    assert [c.arrival_s for c in slow] == pytest.approx([4 * c.arrival_s for c in fast])
    assert [c.exchanges for c in slow] == [c.exchanges for c in fast]


def test_shape():
    """2 to 8 turns, 12 system prompts, nothing longer than the context."""
    conversations = draw(conversations=200)
    turn_counts = {c.exchanges[-1].turn + 1 for c in conversations}
    assert turn_counts == set(range(2, 9))
    assert len({tuple(c.system) for c in conversations}) == SYSTEM_PROMPTS
    for conversation in conversations:
        longest = prompts(conversation, History.KEPT)[-1]
        output, _ = build_output(conversation.exchanges[-1], History.KEPT, MARKERS)
        assert len(longest) + len(output) <= CONTEXT_TOKENS
    assert conversations[0].exchanges[0].pause_s == 0
    assert all(e.pause_s > 0 for c in conversations for e in c.exchanges[1:])


def test_stripped_history_shares_up_to_the_answer():
    """The next prompt begins with the last one up to its assistant tag; no thought comes back."""
    for conversation in draw():
        for earlier, later in pairwise(prompts(conversation, History.STRIPPED)):
            assert shared_tokens(earlier, later) == len(earlier) - 1
            assert earlier[-2:] == [MARKERS.assistant, MARKERS.think_start]
            assert later.count(MARKERS.think_start) == 1
            assert MARKERS.think_end not in later


def test_kept_history_goes_on_where_the_output_ended():
    """The next prompt begins with the last prompt and all that was sampled."""
    for conversation in draw(History.KEPT):
        built = prompts(conversation, History.KEPT)
        for index, (earlier, later) in enumerate(pairwise(built)):
            output, _ = build_output(conversation.exchanges[index], History.KEPT, MARKERS)
            assert later[: len(earlier) + len(output)] == earlier + output


def test_tool_loop_keeps_thinking_until_the_next_user_turn():
    """Inside a turn everything comes back; at the next one thoughts are gone, calls stay."""
    has_loop = False
    for conversation in draw(History.TOOL_LOOP):
        exchanges = conversation.exchanges
        for index, later in enumerate(prompts(conversation, History.TOOL_LOOP)):
            in_turn = [e for e in exchanges[:index] if e.turn == exchanges[index].turn]
            assert later.count(MARKERS.think_end) == len(in_turn)
            has_loop |= bool(in_turn)
            for exchange in in_turn:
                assert exchange.is_tool_call
                output, start = build_output(exchange, History.TOOL_LOOP, MARKERS)
                assert tuple(output[start : start + 2]) == MARKERS.tool_call
    assert has_loop


def test_plain_has_no_thinking():
    """No open thought in the prompt, no think marker in the output."""
    for conversation in draw(History.PLAIN):
        for index, prompt in enumerate(prompts(conversation, History.PLAIN)):
            output, start = build_output(conversation.exchanges[index], History.PLAIN, MARKERS)
            assert prompt[-1] == MARKERS.assistant
            assert start == 0
            assert not {MARKERS.think_start, MARKERS.think_end} & {*prompt, *output}


@pytest.mark.parametrize("history", THINKING)
def test_output_is_thought_answer_and_end(history):
    exchange = draw(history)[0].exchanges[0]
    output, start = build_output(exchange, history, MARKERS)
    assert output[: start - 1] == exchange.think
    assert output[start - 1] == MARKERS.think_end
    assert output[-1] == MARKERS.turn_end


def test_without_pauses_everything_is_offered_at_once():
    conversation = without_pauses(draw()[5])
    assert conversation.arrival_s == 0
    assert {exchange.pause_s for exchange in conversation.exchanges} == {0}


@pytest.mark.parametrize("name", [name for name in ARM_WORDS if name != "stock"])
@pytest.mark.parametrize("history", History)
def test_every_arm_is_a_valid_configuration(name, history):
    """What an arm sets exists; the policy and the tiers are set apart from each other."""
    config = load_config(turns_arm(name, history).settings).config
    assert config.policy.time_budget_us == 10_000_000
    assert config.kv.tiers == (name not in {"noop", "latency"})


def run(hits, **changes):
    figures = TurnsRun(
        requests=10,
        prompt_tokens=1000,
        hit_tokens=hits,
        bound_tokens=800,
        output_tokens=4000,
        conversations=2,
        makespan_s=100.0,
        steady_tokens_per_s=50.0,
        ttft_mean_s=1.0,
        ttfat_mean_s=2.0,
        ttfat_p99_s=3.0,
        preemptions=0,
        recomputed_tokens=0,
        counters={},
        wall_s=0.1,
    )
    return dataclasses.replace(figures, **changes)


def test_figures_of_a_point():
    """Avoidable misses, rho and ratios, over two seeds with their interval."""
    place = Place("stripped", 1000, 0.01)
    runs = {}
    for seed, ours in ((1, 700), (2, 790)):
        runs[RunKey(place, SATURATED, seed)] = run(0)
        runs[RunKey(place, "stock", seed)] = run(600)
        runs[RunKey(place, "tiers", seed)] = run(ours, ttfat_mean_s=1.0)
    infinite, stock, tiers = summarise_turns(runs)
    assert infinite.arm == "infinite"
    assert infinite.figures["hit_share"].value == pytest.approx(0.8)
    assert stock.figures["avoidable_miss_share"].value == pytest.approx(1.0)
    # 2000 tokens per conversation, 0.01 conversations per second, 50 tokens per second.
    assert stock.figures["rho"].value == pytest.approx(0.4)
    misses = tiers.figures["avoidable_miss_share"]
    assert misses.value == pytest.approx(110 / 400)
    assert misses.interval == pytest.approx((0.05, 0.5))
    assert tiers.figures["ttfat_mean_over_stock"].value == pytest.approx(0.5)


def test_nothing_to_avoid_is_no_figure():
    """Where stock misses nothing, the share of avoidable misses is not defined."""
    place = Place("plain", 1000, 0.01)
    runs = {RunKey(place, arm, 1): run(800) for arm in (SATURATED, "stock", "tiers")}
    rows = {row.arm: row for row in summarise_turns(runs)}
    assert rows["tiers"].figures["avoidable_miss_share"].value is None
    assert rows["tiers"].figures["hit_share"].interval is None


def test_bootstrap_brackets_the_statistic():
    low, high = bootstrap_interval([1.0, 2.0, 3.0], lambda values: sum(values) / len(values))
    assert 1.0 <= low < 2.0 < high <= 3.0
    assert bootstrap_interval([1.0], max) is None


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--rate", "-1", "expected a number above 0"),
        ("--rate", "nan", "expected a number above 0"),
        ("--pool", "12k", "expected a whole number above 0"),
        ("--seeds", "5-1", "expected the lower number first"),
        ("--seeds", "one", "expected seeds such as"),
        ("--history", "stripd", "unknown mode 'stripd'; known: stripped"),
        ("--arms", "stock,best", "unknown arm 'best'; known: stock"),
        (
            "--cost",
            "h300",
            "unknown cost model 'h300'; known: h100-30b-a3b-moe, h100-32b-dense",
        ),
        ("--workers", "0", "expected a whole number above 0"),
    ],
)
def test_a_wrong_option_is_one_sentence(option, value, words, tmp_path, capsys):
    """Nothing is started; the message names the option or the value, and what was expected."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "turns", f"{option}={value}", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert printed.startswith("meridian: ")
    assert words in printed
    assert not (tmp_path / "out").exists()


def test_an_unknown_arm_is_refused():
    with pytest.raises(BenchError, match="unknown arm"):
        turns_arm("fastest", History.KEPT)
