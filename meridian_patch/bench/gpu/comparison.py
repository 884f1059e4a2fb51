"""A patched server, then a stock one twice: each has the whole GPU."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.gpu.servers import SEED
from meridian_patch.bench.gpu.suite import Context, Record
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.served.arms import KNOWN_ARMS, PATCHED, STOCK_AGAIN
from meridian_patch.bench.served.capacity import CAPACITY_SHARE, bearable_rate
from meridian_patch.bench.served.load import Load
from meridian_patch.bench.served.report import DATA_NAME, Origin, report_data
from meridian_patch.bench.served.run import describe_failures, play_seed, start_arm
from meridian_patch.bench.served.summary import ArmRun, summarise
from meridian_patch.bench.served.workload import Mix, ServedRequest, make_trace
from meridian_patch.bench.simulated.workloads import draw_trace
from meridian_patch.errors import BenchError
from meridian_patch.replay.cost import load_cost
from meridian_patch.replay.types import StepWork

WORKLOAD = "s-prod"
# Most tokens of prompt, thought and answer: longer ones would outlast the part.
_MOST, _REHEARSED_MOST = (3000, 500, 200), (64, 24, 8)
# Requests that run at a time if nothing waits.
_ROWS = 96
# What a server takes to start, and a trace to end behind its last arrival.
_START_S, _TAIL_S = 70.0, 15.0
_LEAST_TRACE_S, _MOST_TRACE_S, _MOST_SEEDS = 15.0, 60.0, 5
_REHEARSED_REQUESTS, _REHEARSED_RATE = 6, 3.0
_COST = "h100-8b-measured"
_CHARACTERS = "0123456789 +-=?abcdefghijklmnopqrstuvwxyz"
_FIGURES = (
    "ttfat_mean_s",
    "ttft_p50_s",
    "answer_itl_p50_s",
    "answer_itl_p99_s",
    "answer_gap_max_s",
    "tokens_per_s",
)


def run_comparison_part(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """Play the same traces on a patched server, on a stock one, and on that once more.

    What was played counts, also when the part ends early.

    Raises:
        BenchError: a server or a request failed.
    """
    folder = context.folder / "served"
    folder.mkdir(parents=True, exist_ok=True)
    load = Load(request_limit_s=max(30.0, remaining_s()))
    traces, words = _traces(context, load, folder, remaining_s)
    record.notes.append(words)
    runs = {name: ArmRun(name) for name in (STOCK, STOCK_AGAIN, PATCHED)}
    try:
        for arm, names in ((PATCHED, (PATCHED,)), (STOCK, (STOCK, STOCK_AGAIN))):
            log = folder / f"server-{arm}.log"
            settings = context.sized.settings
            with start_arm(
                runs[arm], KNOWN_ARMS[arm], settings, context.base_env, load, log_path=log
            ) as running:
                for name in names:
                    for seed, trace in traces.items():
                        playing = replace(running, run=runs[name])
                        play_seed(playing, seed, trace, load.processes, lambda: None)
                    _check(runs[name], log)
    finally:
        _record(context, runs, words, load, record)
    return f"{len(traces)} traces of {len(next(iter(traces.values())))} requests, played thrice"


def _record(
    context: Context, runs: Mapping[str, ArmRun], words: str, load: Load, record: Record
) -> None:
    """Figures of each arm that was played, and ratios to stock with their spread over traces."""
    machine = replace(describe_machine(), accelerator=context.accelerator)
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = Origin(date, context.command, machine, context.sized.settings, words, load)
    data = report_data([summarise(run) for run in runs.values() if run.seeds], origin)
    (context.folder / "served" / DATA_NAME).write_text(json.dumps(data, indent=1) + "\n")
    add_figures(data, record)


def add_figures(data: Mapping[str, Any], record: Record) -> None:
    """Add what a comparison's data say of each arm and of its ratio to stock."""
    for name in _FIGURES:
        for arm, found in data["arms"].items():
            values = [seed[name] for seed in found["by_seed"].values() if seed.get(name)]
            record.add(f"{name}, {arm}", "1/s" if name == "tokens_per_s" else "s", values)
        for arm, ratios in data["over_stock"].items():
            values = list(ratios.get(name, {}).get("by_seed", {}).values())
            record.add(f"{name}, {arm} over stock", "", values)
    record.notes.append("stock-again over stock is what two equal runs differ by.")


def _check(run: ArmRun, log: Path) -> None:
    for played in run.seeds:
        failures = describe_failures(played.records)
        if failures is not None:
            raise BenchError(f"arm {run.name}: {failures}; see {log}")


def _traces(
    context: Context, load: Load, folder: Path, remaining_s: Callable[[], float]
) -> tuple[dict[int, list[ServedRequest]], str]:
    """Traces that the part has time for, and what they are in words."""
    if context.sized.is_dummy:
        # Lengths are given: one trace as long as there is time for.
        left_s = (remaining_s() - 2 * _START_S) / 3 - _TAIL_S
        rate = bearable_by_cost(context.folder / "cost.yaml")
        number = round(rate * max(_LEAST_TRACE_S, min(_MOST_TRACE_S, left_s)))
        most = _MOST
        if context.rehearse:
            rate, number, most = _REHEARSED_RATE, _REHEARSED_REQUESTS, _REHEARSED_MOST
        return {SEED: sized_trace(number, rate, SEED, most)}, (
            f"{number} requests of {WORKLOAD}, {rate:.1f} per second, prompts of at most "
            f"{most[0]}, thoughts of at most {most[1]} and answers of at most {most[2]} tokens."
        )
    if context.rehearse:
        mix = Mix(requests=6, rate_per_s=3.0, max_tokens=128)
        return {SEED: make_trace(mix, SEED)}, str(mix)
    console = Console(quiet=True)
    rate, _ = bearable_rate(context.sized.settings, load, CAPACITY_SHARE, folder, console)
    mix = Mix(requests=160, rate_per_s=rate)
    of_seed = 3 * (mix.requests / mix.rate_per_s + _TAIL_S)
    number = int(max(1.0, min(float(_MOST_SEEDS), (remaining_s() - 2 * _START_S) / of_seed)))
    return {seed: make_trace(mix, seed) for seed in range(SEED, SEED + number)}, str(mix)


def sized_trace(
    requests: int, rate_per_s: float, seed: int, most: tuple[int, int, int] = _MOST
) -> list[ServedRequest]:
    """Chat requests with the lengths of the workload, for a model whose thoughts never end.

    One character of a prompt is one token of the tiny reasoner's tokenizer.
    """
    most_prompt, most_think, most_answer = most
    trace = []
    for place, each in enumerate(draw_trace(WORKLOAD, requests, rate_per_s, seed)):
        think = min(max(each.think_tokens, 1), most_think)
        length = min(each.prompt_tokens, most_prompt)
        # Prompts differ from their first character on, so that none hits another's prefix.
        start = f"{place} "
        content = (start + _CHARACTERS * (length // len(_CHARACTERS) + 1))[:length]
        trace.append(
            ServedRequest(
                id=each.id,
                arrival_s=each.arrival_s or 0.0,
                messages=({"role": "user", "content": content},),
                expected="",
                max_tokens=think + min(each.answer_tokens, most_answer),
                extra={"thinking_token_budget": think, "ignore_eos": True},
            )
        )
    return trace


def bearable_by_cost(path: Path) -> float:
    """Requests per second that keep about ``_ROWS`` running.

    By the cost model at the path, or a packaged one where none was fitted.
    """
    cost = load_cost(str(path) if path.is_file() else _COST)
    lengths = sized_trace(400, 1.0, SEED)
    prompt = sum(len(each.messages[0]["content"]) for each in lengths) / len(lengths)
    output = sum(each.max_tokens for each in lengths) / len(lengths)
    context = _ROWS * (prompt + output / 2)
    decode = StepWork(decode_seqs=_ROWS, context_tokens=int(context), attended_tokens=int(context))
    seconds = output * cost.step_seconds(decode) + _ROWS * prompt * cost.token_s
    return _ROWS / seconds
