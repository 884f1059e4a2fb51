"""``meridian bench replay`` and ``sweep``: options, failures, interruption, what is written."""

import json

import numpy as np
import pytest
from pictures import watch_pictures
from replay_runs import replay_run

from meridian_patch import cli
from meridian_patch.bench.simulated import session
from meridian_patch.bench.simulated.grid import SweepPoint
from meridian_patch.bench.simulated.run import Timeline
from meridian_patch.bench.simulated.trace import read_trace
from meridian_patch.phase.tracker import Phase

QUICK = ["--requests", "5", "--rate", "2", "--pool", "200000", "--arms", "noop"]


class FakeWorkers:
    """Answers each job at once; what a job comes to is set per test."""

    results = staticmethod(lambda _key, _number: replay_run())

    def __init__(self, _processes):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, jobs):
        for number, key in enumerate(jobs):
            yield key, self.results(key, number)


@pytest.fixture
def fake(monkeypatch):
    def use(results):
        workers = type("Fake", (FakeWorkers,), {"results": staticmethod(results)})
        monkeypatch.setattr(session, "Workers", workers)
        monkeypatch.setattr("meridian_patch.bench.simulated.command.end_like_ctrl_c", lambda: None)

    return use


def meridian(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *map(str, arguments)])
    return ended.value.code


def timeline():
    counts = np.array([1, 2])
    return Timeline(np.array([0.0, 1.0]), counts, dict.fromkeys(Phase, counts), counts / 10)


def test_replay_writes_page_data_plots_and_trace(fake, tmp_path, capsys):
    fake(lambda _key, _number: replay_run(timeline=timeline()))
    trace = tmp_path / "trace.jsonl"
    arguments = [*QUICK, "--seeds", "1-2", "--out", tmp_path / "out", "--write-trace", trace]
    assert meridian("replay", *arguments) == 0
    printed = capsys.readouterr().out
    assert "s-prod, 2 requests/s, pool 200,000 tokens, 2 seeds" in printed
    assert "simulated, cost model h100-8b-dense (derived)" in printed
    names = {path.name for path in (tmp_path / "out").iterdir()}
    stem = "s-prod-rate-2-pool-200000"
    assert names == {"report.html", "results.json"} | {
        f"{stem}-{kind}.png" for kind in ("cdf", "harm", "timeline")
    }
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert data["provenance"] == "simulated"
    assert data["cost_model"]["provenance"] == "derived"
    assert not data["is_partial"]
    assert [row["arm"] for row in data["rows"]] == ["stock", "noop"]
    assert data["rows"][1]["figures"]["ttfat_mean_s"]["over_stock"] == 1.0
    assert "simulated" in (tmp_path / "out" / "report.html").read_text()
    assert len(read_trace(trace)) == 5


def test_sweep_takes_lists_and_draws_goodput(fake, tmp_path):
    fake(lambda _key, _number: replay_run())
    arguments = ["--workload", "s-prod,s-plain", "--requests", "5", "--rate", "1"]
    arguments += ["--pool", "100000,200000", "--arms", "", "--out", tmp_path]
    assert meridian("sweep", *arguments) == 0
    data = json.loads((tmp_path / "results.json").read_text())
    assert len({(r["workload"], r["pool_tokens"], r["rate_per_s"]) for r in data["rows"]}) == 4
    assert (tmp_path / "goodput.png").exists()


def test_pictures_hold_all_their_words(fake, tmp_path, monkeypatch):
    """Of one panel and of several; the limits of goodput and the command are long."""
    cut = watch_pictures(monkeypatch)
    fake(lambda _key, _number: replay_run(timeline=timeline()))
    for workloads in ("s-prod", "s-prod,s-plain,s-turns"):
        arguments = ["--workload", workloads, "--requests", "5", "--rate", "1", "--pool", "200000"]
        assert meridian("sweep", *arguments, "--out", tmp_path) == 0
    assert cut == []


def test_the_first_picture_stands_above_the_table(fake, tmp_path):
    fake(lambda _key, _number: replay_run())
    assert meridian("replay", *QUICK, "--seeds", "1", "--out", tmp_path) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.index("How soon answers begin, and how long") < page.index("<table>")
    assert page.count("How soon answers begin, and how long") == 2  # title and alternative text


def test_a_failed_replay_is_named_and_the_others_are_reported(fake, tmp_path, capsys):
    fake(lambda key, _number: "no room" if key.arm == "noop" and key.seed == 2 else replay_run())
    assert meridian("replay", *QUICK, "--seeds", "1-3", "--out", tmp_path) == 1
    name = "s-prod, 2 requests/s, pool 200,000 tokens, arm noop, seed 2"
    assert f"{name} failed: no room" in capsys.readouterr().out
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["is_partial"]
    assert data["failures"] == {name: "no room"}
    assert [row["seeds"] for row in data["rows"]] == [[1, 2, 3], [1, 3]]


def test_ctrl_c_writes_what_has_ended(fake, tmp_path, capsys):
    def interrupted(_key, number):
        if number == 3:
            raise KeyboardInterrupt
        return replay_run()

    fake(interrupted)
    assert meridian("replay", *QUICK, "--seeds", "1-3", "--out", tmp_path) == 130
    assert "interrupted" in capsys.readouterr().out
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["is_partial"]
    assert [row["seeds"] for row in data["rows"]] == [[1, 2], [1]]
    assert "Not complete" in (tmp_path / "report.html").read_text()


def test_a_failed_calibration_is_one_sentence(fake, tmp_path, capsys):
    fake(lambda _key, _number: "no room")
    assert meridian("replay", "--out", tmp_path) == 1
    assert capsys.readouterr().err == "meridian: saturated stock, s-prod, seed 90001: no room\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "s-fast"], "unknown workload 's-fast'; known: s-prod"),
        (["--arms", "fast"], "unknown arm 'fast'; known: stock"),
        (["--arm", "mine:policy.speed=2"], "arm 'mine':"),
        (["--cost", "h9000"], "unknown cost model 'h9000'; known:"),
        (["--seeds", "x"], "--seeds is 'x'"),
        (["--seeds", "5-1"], "expected the lower number first"),
        (["--requests", "0"], "--requests is '0'"),
        (["--workers", "0"], "--workers is '0', expected a whole number above 0"),
        (["--pool", "12k"], "--pool is '12k', expected a whole number above 0"),
        (["--rho", "-1"], "--rho is '-1'"),
        (["--rho", "1", "--rate", "1"], "--rho and --rate are both given"),
        (["--pool", "9", "--kv-cap", "1"], "--kv-cap and --pool are both given"),
        (["--rho", "0.7,0.9"], "lists are for 'meridian bench sweep'"),
        (["--max-itl-ms", "no"], "--max-itl-ms is 'no'"),
        (["--offload-gb-per-s", "0"], "--offload-gb-per-s is '0'"),
        (["--trace", "/nowhere/t.jsonl"], "cannot read the trace /nowhere/t.jsonl"),
        (["--rate", "1", "--pool", "160"], "the KV pool is 160 tokens, expected at least"),
        (["--out", "/proc/nowhere"], "--out: cannot write to /proc/nowhere"),
    ],
)
def test_wrong_options_are_one_sentence(arguments, message, tmp_path, capsys, fake):
    fake(lambda _key, _number: replay_run())
    assert meridian("replay", "--out", tmp_path, *arguments) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("meridian: ")
    assert message in shown
    assert "Traceback" not in shown


def test_a_trace_is_one_draw(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    line = {"id": "a", "arrival_s": 0.0, "prompt_tokens": 5, "think_tokens": 5, "answer_tokens": 5}
    trace.write_text(json.dumps(line) + "\n")
    arguments = ["replay", "--trace", trace, "--out", tmp_path / "out"]
    assert meridian(*arguments, "--seeds", "1,2") == 1
    assert "a trace file is one draw" in capsys.readouterr().err
    assert meridian(*arguments, "--workload", "s-prod") == 1
    assert "--workload and --trace are both given" in capsys.readouterr().err
    assert meridian(*arguments, "--history", "lost") == 1
    assert "--history: unknown mode 'lost'" in capsys.readouterr().err


def test_a_trace_has_a_load_of_its_own(fake, tmp_path):
    fake(lambda _key, _number: replay_run())
    trace = tmp_path / "t.jsonl"
    assert meridian("replay", *QUICK, "--out", tmp_path / "a", "--write-trace", trace) == 0
    assert meridian("replay", "--trace", trace, "--pool", "200000", "--out", tmp_path / "b") == 0
    row = json.loads((tmp_path / "b" / "results.json").read_text())["rows"][0]
    point = SweepPoint(**{name: row[name] for name in SweepPoint._fields})
    assert point == SweepPoint("t.jsonl", None, 200_000, None, None)
