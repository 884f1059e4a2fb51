"""The page of arms: what is resumed, what it says, and the search for goodput."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import arms_page
import numpy as np
import pytest
from arms import page
from arms.campaign import TUNING_SEEDS, UNSEEN_SEEDS, Point, keys, label
from arms.goodput import Goodput, bracket
from arms.registry import ARMS
from arms.replays import Key, Line, digest
from arms.results import Results
from arms.summary import COLUMNS, Summary, quotient
from arms.targets import TARGETS

NAMES = ("stock", "latency", *ARMS)
POINT = Point("s-prod", 100_000, 1.1, 2.0)
FIGURES = {each.figure for each in (*COLUMNS, *TARGETS)}


def line(key: Key, value: float = 1.0, code: str | None = None) -> Line:
    return Line(key, code or digest(key.arm), dict.fromkeys(FIGURES, value), [1.0], [1.0], 2.0)


def summary(seeds: tuple[int, ...] = (401, 402), **values: float) -> Summary:
    lines = {key: line(key, values.get(key.arm, 1.0)) for key in keys([POINT], NAMES, seeds, 600)}
    return Summary(lines, NAMES, seeds, 600)


def test_what_was_played_is_not_played_again(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    key = Key("s-prod", 100_000, 2.0, 401, 600, "mlfq", (("first_level", 256),))
    stale = line(key._replace(seed=402), code="of other code")
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in (line(key), stale)))
    assert Results(path).lines == {key: line(key)}


def test_what_an_arm_depends_on_is_in_its_digest() -> None:
    digests = {arm: digest(arm) for arm in NAMES}
    # Two arms of one file may have one digest only if all of their code is the same.
    assert digests["stock"] != digests["latency"]
    assert digests["mlfq"] != digests["pascal"]


def test_seeds_are_apart() -> None:
    assert not set(TUNING_SEEDS) & set(UNSEEN_SEEDS)


def test_the_page_has_every_arm_and_its_interval(tmp_path: Path) -> None:
    goodputs = [
        Goodput("s-prod", 100_000, arm, rate, rate * 1.05)
        for arm, rate in (("stock", 1.0), ("latency", 2.0), ("mlfq-answers", 2.5), ("srpt", 4.0))
    ]
    text = page.write(tmp_path / "arms.md", summary(latency=3.0), [POINT], goodputs, "--seeds 1")
    assert (tmp_path / "arms.png").stat().st_size > 10_000
    for arm in NAMES:
        assert label(arm) in text
    assert "| TTFAT mean ÷ oracle SRPT | ≤ 1.05 | 3.00 **missed** |" in text
    assert "| s-prod, 100,000 tokens | 0.80 **missed** | 0.50 **missed** |" in text


def test_a_point_without_a_whole_seed_is_named(tmp_path: Path) -> None:
    text = page.write(tmp_path / "a.md", Summary({}, NAMES, [401], 600), [POINT], [], "")
    assert "Not played to the end yet: s-prod, ρ 1.1" in text  # noqa: RUF001


def test_intervals_are_paired() -> None:
    """Seeds differ a thousandfold, and the ratio does not."""
    stock = np.array([1.0, 10.0, 1000.0])
    assert quotient(2 * stock, stock).interval == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize("best", [0.2, 0.97, 1.0, 2.4, 5.0])
def test_the_search_ends_close_to_the_highest_load(best: float) -> None:
    low, high = bracket(lambda load: 1.0 if load <= best else 0.5)
    assert low <= best < high <= low * 1.06


def test_an_arm_that_serves_nobody_well_ends_the_search() -> None:
    assert bracket(lambda load: 0.0)[0] == 0.0


@pytest.mark.parametrize("option", ["--arms", "--goodput"])
def test_an_unknown_arm_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["arms_page", option, "mlfq,fifo", "--out", str(tmp_path)])
    assert arms_page.main() == 2
    refused = f"arms_page: {option}: unknown arm 'fifo'; known: stock, latency, fcfs-tuned"
    assert capsys.readouterr().err.startswith(refused)
