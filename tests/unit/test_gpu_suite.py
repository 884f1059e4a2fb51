"""scripts/gpu_suite without engines: verdicts, time limits, Ctrl-C, the report, the options."""

import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from gpu_suite import checks, command, comparison, cost, kernels, shapes
from gpu_suite.report import REHEARSED, describe_origin, write_report
from gpu_suite.suite import (
    FAILED,
    NOT_RUN,
    PASSED,
    SKIPPED,
    Context,
    Part,
    Record,
    Served,
    SkippedError,
    run_suite,
)
from rich.console import Console

from meridian_patch.bench.interrupts import end_like_ctrl_c
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.served.plan import any_settings, packaged_model
from meridian_patch.bench.simulated.fit_command import write_cost
from meridian_patch.config.family_files import load_families
from meridian_patch.config.matching import ModelIdentity, match_family
from meridian_patch.errors import BenchError
from meridian_patch.replay.cost import load_cost


@pytest.fixture
def context(tmp_path: Path) -> Context:
    model = packaged_model()
    tiny = Served(model, any_settings(model, 96, ()), is_tiny=True)
    return Context(
        thinking=tiny,
        sized=tiny,
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


def run(context: Context, *functions, minutes: float = 10.0, after=lambda context, _: context):
    parts = [Part(each.__name__, "it works", 0.5, each) for each in functions]
    sink = io.StringIO()
    records, was_interrupted = run_suite(context, parts, minutes, Console(file=sink), after)
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


def test_time_that_is_left_over_goes_to_later_parts(context: Context) -> None:
    records, _, _ = run(context, good, good, good, minutes=3.0)
    limits = [record.limit_s for record in records]
    assert limits == pytest.approx([60.0, 90.0, 180.0], abs=1.0)


def test_the_report_is_written_as_it_goes(context: Context) -> None:
    seen = []

    def after(context: Context, records) -> Context:
        seen.append([record.verdict for record in records])
        return context

    run(context, good, fails, after=after)
    assert seen == [[PASSED, NOT_RUN], [PASSED, FAILED]]


def test_without_compilation_where_servers_do_not_start_with_it(context: Context) -> None:
    reason = "the vLLM server ended with exit code 1. Its log is here"
    failed = Record("served", "", 1.0, verdict=FAILED, reason=reason)
    later = command.adapt(context, [failed])
    assert later.is_eager
    assert "--enforce-eager" in later.sized.settings.options
    assert failed.notes == ["The later parts run with --enforce-eager."]
    assert command.adapt(later, [failed]) is later
    served = Record("served", "", 1.0, verdict=FAILED, reason="1 of 32 requests failed")
    assert command.adapt(context, [served]) is context


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


def test_chosen_parts_keep_their_order() -> None:
    chosen = command.choose_parts("served,kernel-bench")
    assert [part.name for part in chosen] == ["kernel-bench", "served"]
    assert command.choose_parts(None) == list(command.PARTS)


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
    monkeypatch.setattr(command, "gpu_name", lambda: None)
    with pytest.raises(SystemExit) as ended:
        command.main([*options.split(), "--out", str(tmp_path)])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err


def test_a_gpu_serves_with_the_defaults(tmp_path: Path) -> None:
    """The sizes that a CPU needs for the tiny reasoner would hide what users run."""
    options = command._parse(["--shape", "qwen3-8b"])
    context = command._context(options, tmp_path, "NVIDIA H100", {}, "gpu_suite")
    tiny, sized = context.thinking.settings.options, context.sized.settings.options
    assert tiny == ["--reasoning-parser", "deepseek_r1", "--dtype", "bfloat16"]
    assert "--num-gpu-blocks-override" not in sized
    assert "--enforce-eager" not in sized
    assert sized[sized.index("--max-num-batched-tokens") + 1] == "8192"
    arguments = cost.fitted_arguments(context)
    assert arguments["max_num_batched_tokens"] == 8192
    # The last one counts.
    last = len(sized) - sized[::-1].index("--max-model-len")
    assert arguments["max_model_len"] == int(sized[last])
    assert arguments["enforce_eager"] is False


def test_without_a_gpu(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpu_name", lambda: None)
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path / "none")])
    assert "torch finds no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_without_a_checkout(context: Context) -> None:
    for part in (kernels.run_tests, kernels.run_bench):
        with pytest.raises(SkippedError, match="without a checkout"):
            part(context, Record("k", "", 1.0), lambda: 1.0)


def test_steps_of_the_grid_fit_the_engine() -> None:
    """Rows and contexts within the pool of an 80 GB GPU, prompts within the context."""
    plays = cost.grid_plays(rehearse=False, longest=16896)
    assert "burst 256 x 512" in plays
    assert "burst 8 x 16384" in plays
    for name, requests in plays.items():
        lengths = [len(request["prompt"]) + request["max_tokens"] for request in requests]
        assert max(lengths) <= 16896, name
        assert sum(lengths) <= 300_000, name
    chunks = {len(request["prompt"]) for request in plays["burst prompts beside 32"]}
    assert {64, 2048} <= chunks
    assert [*plays][:3] == ["warm-up", "burst prompts beside 0", "burst prompts beside 32"]
    assert "burst 8 x 16384" not in cost.grid_plays(rehearse=False, longest=2048)


def test_requests_have_the_lengths_of_the_workload() -> None:
    trace = comparison.sized_trace(50, 2.0, 31)
    for request in trace:
        think = request.extra["thinking_token_budget"]
        assert 1 <= think <= 500
        assert think < request.max_tokens <= think + 200
        assert 1 <= len(request.messages[0]["content"]) <= 3000
    starts = {request.messages[0]["content"][:4] for request in trace}
    assert len(starts) == len(trace)


def test_rate_by_the_cost_model(tmp_path: Path) -> None:
    """The fitted one where there is one."""
    path = tmp_path / "cost.yaml"
    packaged = comparison.bearable_by_cost(path)
    assert 2 < packaged < 60
    cost = load_cost("h100-8b-measured")
    write_cost(path, cost.model_copy(update={"weights_s": 10 * cost.weights_s}))
    assert comparison.bearable_by_cost(path) < packaged / 3


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
    assert checks.close_lags(trace) == [3.0, 1.0]
    assert checks.close_lags(tmp_path / "none") == []


def test_a_synchronisation_in_the_log_is_a_failure(tmp_path: Path) -> None:
    """Our code catches its own errors: the server serves on, and the log alone tells."""
    log = tmp_path / "server.log"
    log.write_text("INFO all is well\n")
    checks.check_log(log)
    log.write_text("RuntimeError: GPU<->CPU sync detected - avoid it\nINFO served\n")
    with pytest.raises(BenchError, match="1 synchronisations, the first: RuntimeError"):
        checks.check_log(log)


def test_ratios_of_a_comparison() -> None:
    seeds = {"31": {"tokens_per_s": 100.0}, "32": {"tokens_per_s": 120.0}}
    over = {"patched": {"tokens_per_s": {"by_seed": {"31": 1.1, "32": 0.9}}}}
    record = Record("served", "", 1.0)
    data = {"arms": {"stock": {"by_seed": seeds}}, "over_stock": over}
    comparison.add_figures(data, record, "busy")
    found = {figure.name: figure.spread.median for figure in record.figures}
    assert found == {
        "tokens_per_s, busy, stock": 110.0,
        "tokens_per_s, busy, patched over stock": 1.0,
    }


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

    monkeypatch.setattr(checks, "_serve_checked", serve)
    record = Record("sync-check", "", 600.0)
    with pytest.raises(BenchError, match="2 found"):
        checks.run_sync_check(context, record, lambda: 600.0)
    assert record.notes == [note]
