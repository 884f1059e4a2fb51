"""scripts/gpu_suite without engines: verdicts, time limits, Ctrl-C, the report, the options."""

import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from meridian_patch.bench.gpu import command, cost, kernels, served, shapes
from meridian_patch.bench.gpu.report import REHEARSED, describe_origin, write_report
from meridian_patch.bench.gpu.suite import (
    FAILED,
    NOT_RUN,
    PASSED,
    SKIPPED,
    Context,
    Part,
    Record,
    SkippedError,
    run_suite,
)
from meridian_patch.bench.interrupts import end_like_ctrl_c
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.served.plan import any_settings, packaged_model
from meridian_patch.config.families import load_families
from meridian_patch.config.matching import ModelIdentity, match_family
from meridian_patch.errors import BenchError


@pytest.fixture
def context(tmp_path: Path) -> Context:
    model = packaged_model()
    return Context(
        model=model,
        settings=any_settings(model, 96, ()),
        is_tiny=True,
        is_dummy=False,
        rehearse=True,
        accelerator=None,
        folder=tmp_path,
        checkout=None,
        base_env={},
        command="scripts/gpu_suite --rehearse",
    )


@pytest.fixture(autouse=True)
def signals_as_in_the_command():
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    end_like_ctrl_c()
    yield
    for number, handler in before:
        signal.signal(number, handler)


def good(_context, record: Record, remaining_s) -> str:
    record.add("gap", "ms", [3.0, 1.0, 2.0])
    record.add("nothing", "ms", [])
    assert 0 < remaining_s() <= record.limit_s
    return "all is well"


def fails(_context, record: Record, _remaining_s) -> str:
    record.add("half", "", [1.0])
    raise BenchError("a request failed")


def breaks(*_) -> str:
    raise ZeroDivisionError("ours")


def skips(*_) -> str:
    raise SkippedError("no checkout")


def hangs(*_) -> str:
    time.sleep(60)
    return "never"


def is_interrupted(*_) -> str:
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    return hangs()


def run(context: Context, *functions, minutes: float = 10.0):
    parts = [Part(each.__name__, "it works", 1 / len(functions), each) for each in functions]
    sink = io.StringIO()
    records, was_interrupted = run_suite(context, parts, minutes, Console(file=sink))
    return records, was_interrupted, sink.getvalue()


def test_a_failed_part_does_not_end_the_others(context: Context) -> None:
    records, was_interrupted, shown = run(context, fails, breaks, skips, good)
    assert [record.verdict for record in records] == [FAILED, FAILED, SKIPPED, PASSED]
    reasons = ["a request failed", "ZeroDivisionError: ours", "no checkout", "all is well"]
    assert [record.reason for record in records] == reasons
    assert not was_interrupted
    # What a part found before it failed is kept.
    assert [figure.name for figure in records[0].figures] == ["half"]
    assert "good: passed" in shown
    assert "fails: at most 2.5 min" in shown


def test_figures_have_a_spread(context: Context) -> None:
    [figure] = run(context, good)[0][0].figures
    spread = figure.spread
    assert (spread.median, spread.low, spread.high, spread.count) == (2.0, 1.0, 3.0, 3)


def test_a_part_ends_with_its_share_of_the_time(context: Context) -> None:
    begin = time.monotonic()
    records, was_interrupted, _ = run(context, hangs, good, minutes=1 / 60)
    assert time.monotonic() - begin < 10
    assert records[0].verdict == FAILED
    assert records[0].reason == "did not end within its 0.0 minutes"
    assert records[1].verdict == PASSED
    assert not was_interrupted


def test_ctrl_c_keeps_what_there_is(context: Context) -> None:
    records, was_interrupted, _ = run(context, good, is_interrupted, good)
    assert was_interrupted
    assert [record.verdict for record in records] == [PASSED, FAILED, NOT_RUN]
    assert records[1].reason == "interrupted by Ctrl-C"


def test_report(context: Context) -> None:
    """One page that needs no other file, and the same as data."""
    records, _, _ = run(context, good, fails, skips)
    records[1].reason = "<b>a log's line</b>"
    origin = describe_origin(context, describe_machine(), "2030-01-01T00:00:00+00:00", 45.0)
    page = write_report(context.folder, origin, records)
    text = page.read_text()
    data = json.loads((context.folder / "report.json").read_text())
    assert data["how"] == origin.how == REHEARSED
    assert [part["verdict"] for part in data["parts"]] == [PASSED, FAILED, SKIPPED]
    assert data["parts"][0]["figures"][0]["spread"]["median"] == 2.0
    assert data["versions"]["torch"]
    assert "&lt;b&gt;a log" in text
    assert "src=" not in text
    assert 'href="http' not in text


def test_shares_add_up() -> None:
    assert sum(part.share for part in command.PARTS) == pytest.approx(1)
    chosen = command.choose_parts("served,kernel-bench")
    assert [part.name for part in chosen] == ["kernel-bench", "served"]
    assert sum(part.share for part in chosen) == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--minutes 0", "--minutes is '0'"),
        ("--parts kernels", "--parts: unknown part 'kernels'; known: kernel-tests"),
        ("--rehearse --shape qwen3-9b", "--shape is 'qwen3-9b', expected one of qwen3-0.6b"),
        ("--rehearse --shape qwen3-8b --model x", "--shape makes a model and --model gives one"),
        ("--rehearse --blocks none", "--blocks is 'none'"),
    ],
)
def test_wrong_options(
    options: str, message: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "accelerator_name", lambda: None)
    with pytest.raises(SystemExit) as ended:
        command.main([*options.split(), "--out", str(tmp_path)])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err


def test_without_a_gpu(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "accelerator_name", lambda: None)
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path / "none")])
    assert "vLLM finds no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_without_a_checkout(context: Context) -> None:
    for part in (kernels.run_tests, kernels.run_bench):
        with pytest.raises(SkippedError, match="without a checkout"):
            part(context, Record("k", "", 1.0), lambda: 1.0)


def test_a_cost_model_needs_the_models_files(context: Context) -> None:
    hub = Context(**vars(context) | {"model": "Qwen/Qwen3-8B"})
    with pytest.raises(SkippedError, match="expected a directory"):
        cost.run_fit(hub, Record("c", "", 1.0), lambda: 1.0)


def test_shape(tmp_path: Path) -> None:
    """The sizes of Qwen3-8B, and a tokenizer within its vocabulary."""
    directory = shapes.write_shape("qwen3-8b", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [config[name] for name in sizes] == [4096, 36, 32, 8]
    assert (config["head_dim"], config["intermediate_size"]) == (128, 12288)
    assert config["eos_token_id"] < config["vocab_size"] == 151936
    assert (directory / "tokenizer.json").is_file()
    assert not list(directory.glob("*.safetensors"))
    # Markers are the tokenizer's.
    identity = ModelIdentity((directory.name,), tuple(config["architectures"]), None)
    match = match_family(load_families(None), identity)
    assert match is not None
    assert match.label == "tiny_reasoner"


def test_lag_is_read_from_the_trace(tmp_path: Path) -> None:
    """Of closed thoughts alone: one that ended by itself says nothing."""
    closed = {"think_tokens": 64, "reason": "hard_cap", "fired_at": 64, "why": ""}
    events = [
        {"event": "verdict", "think_tokens": 64},
        {"event": "end", "think_tokens": 67, "reason": "hard_cap", "verdict": closed},
        {"event": "end", "think_tokens": 66, "reason": "natural", "verdict": closed},
        {"event": "end", "think_tokens": 20, "reason": "natural", "verdict": None},
        {"event": "end", "think_tokens": 65, "reason": "hard_cap", "verdict": closed},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert served.close_lags(trace) == [3.0, 1.0]
    assert served.close_lags(tmp_path / "none") == []


def test_a_synchronisation_in_the_log_is_a_failure(tmp_path: Path) -> None:
    """Our code catches its own errors: the server serves on, and the log alone tells."""
    log = tmp_path / "server.log"
    log.write_text("INFO all is well\n")
    served.check_log(log)
    log.write_text("RuntimeError: GPU<->CPU sync detected - avoid it\nINFO served\n")
    with pytest.raises(BenchError, match="1 synchronisations, the first: RuntimeError"):
        served.check_log(log)


def test_ratios_of_a_comparison(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    seeds = {"31": {"tokens_per_s": 100.0}, "32": {"tokens_per_s": 120.0}}
    over = {"patched": {"tokens_per_s": {"by_seed": {"31": 1.1, "32": 0.9}}}}
    path.write_text(json.dumps({"arms": {"stock": {"by_seed": seeds}}, "over_stock": over}))
    record = Record("served", "", 1.0)
    served.read_comparison(path, record)
    found = {figure.name: figure.spread.median for figure in record.figures}
    assert found == {"tokens_per_s, stock": 110.0, "tokens_per_s, patched over stock": 1.0}


@pytest.mark.parametrize(
    ("of_stock", "note"),
    [
        ("3 found", "Stock vLLM fails on the same requests, too: 3 found"),
        ("", "Stock vLLM serves the same requests under the same check."),
    ],
)
def test_a_failed_check_says_what_stock_does(
    of_stock: str, note: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure of the patched server is kept; the note says whose it is."""

    def serve(_context, env, _log, _limit_s):
        failure = "2 found" if env["MERIDIAN_PATCH"] == "1" else of_stock
        if failure:
            raise BenchError(failure)
        return {}

    monkeypatch.setattr(served, "_serve_checked", serve)
    record = Record("sync-check", "", 600.0)
    with pytest.raises(BenchError, match="2 found"):
        served.run_sync_check(context, record, lambda: 600.0)
    assert record.notes == [note]
