"""A stock and a patched server on one GPU, one at a time under load, and stock once more."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from gpu_suite.servers import SEED
from gpu_suite.suite import HALF_OF_THE_GPU, Context, Record, Served
from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.served.arms import KNOWN_ARMS, PATCHED, STOCK_AGAIN
from meridian_patch.bench.served.capacity import CAPACITY_SHARE, bearable_rate
from meridian_patch.bench.served.load import Load
from meridian_patch.bench.served.report import DATA_NAME, Origin, report_data
from meridian_patch.bench.served.run import (
    RunningArm,
    describe_failures,
    launch_arm,
    play_seed,
    rotated,
)
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
# KV pools of the two servers of a shape, in tokens: with all rows of the greater rate it is short.
_POOL = 60_000
# Bytes that hold it. With a given pool vLLM profiles no memory, so that both start at once.
_ROOM = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(12 * 2**30))
# Of a trace, and what it takes to end behind its last arrival.
_TRACE_S, _TAIL_S = 40.0, 15.0
_WARM_UP_REQUESTS, _MOST_SEEDS = 40, 5
# What a server takes to start.
_START_S = 70.0
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


@dataclass(frozen=True)
class _Load:
    """Traces by seed; their figures are told apart by the name."""

    name: str
    words: str
    traces: Mapping[int, Sequence[ServedRequest]]


def run_comparison_part(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """Play the same traces in turn on a patched server, on a stock one, and on that once more.

    What was played counts, also when the part ends early.

    Raises:
        BenchError: a server or a request failed.
    """
    folder = context.folder / "served"
    folder.mkdir(parents=True, exist_ok=True)
    load = Load(request_limit_s=max(30.0, remaining_s()))
    served = shared_gpu(context)
    # Before the servers hold the GPU: finding a rate may take one of its own.
    loads = _loads(context, load, folder, remaining_s)
    played = 0
    with ExitStack() as up:
        servers = _start(context, served, load, folder, up)
        for number, each in enumerate(loads):
            record.notes.append(each.words)
            runs = {name: ArmRun(name) for name in (PATCHED, STOCK, STOCK_AGAIN)}
            try:
                for seed, trace in each.traces.items():
                    for name in rotated([*runs], number + seed - SEED):
                        needed_s = trace[-1].arrival_s + _TAIL_S
                        if remaining_s() < needed_s and not context.rehearse:
                            continue
                        running = servers[PATCHED if name == PATCHED else STOCK]
                        playing = replace(running, run=runs[name])
                        play_seed(playing, seed, trace, load.processes, lambda: None)
                        _check(runs[name], folder / f"server-{running.run.name}.log")
                        played += 1
            finally:
                _record(context, served, runs, each, load, record)
    record.notes.append("stock-again over stock is what two equal runs differ by.")
    return f"{played} plays"


def shared_gpu(context: Context) -> Served:
    """The sized model as each of two servers runs it that share a GPU."""
    served = context.sized
    if context.accelerator is None or context.rehearse:
        return served
    if not served.is_dummy:
        return served.with_options(*HALF_OF_THE_GPU)
    served = served.with_options(*_ROOM)
    blocks = served.settings.kv_blocks or _POOL // 16
    return replace(served, settings=replace(served.settings, kv_blocks=blocks))


def _start(
    context: Context, served: Served, load: Load, folder: Path, up: ExitStack
) -> dict[str, RunningArm]:
    """Both servers, up and warm."""
    launched: dict[str, Callable[[], RunningArm]] = {}
    servers: dict[str, RunningArm] = {}
    for arm in (PATCHED, STOCK):
        # Of two that compile at once, neither may find a half of what the other has compiled.
        base = context.base_env | {"VLLM_CACHE_ROOT": str(folder / f"cache-{arm}")}
        launched[arm] = up.enter_context(
            launch_arm(
                ArmRun(arm),
                KNOWN_ARMS[arm],
                served.settings,
                base,
                load,
                log_path=folder / f"server-{arm}.log",
            )
        )
        if not served.is_dummy:
            # vLLM's profile of the GPU's memory counts a neighbour's as its own.
            servers[arm] = launched.pop(arm)()
    servers |= {arm: ready() for arm, ready in launched.items()}
    if served.is_dummy and not context.rehearse:
        for running in servers.values():
            rate = bearable_by_cost(context.folder / "cost.yaml")
            trace = sized_trace(_WARM_UP_REQUESTS, rate, SEED - 1)
            play_seed(running, SEED - 1, trace, load.processes, lambda: None)
    return servers


def _record(
    context: Context,
    served: Served,
    runs: Mapping[str, ArmRun],
    each: _Load,
    load: Load,
    record: Record,
) -> None:
    """Figures of each arm that was played, and ratios to stock with their spread over traces."""
    machine = replace(describe_machine(), accelerator=context.accelerator)
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = Origin(date, context.command, machine, served.settings, each.words, load)
    arms = [summarise(runs[name]) for name in (STOCK, PATCHED, STOCK_AGAIN) if runs[name].seeds]
    if not arms:
        return
    data = report_data(arms, origin)
    path = context.folder / "served" / f"{each.name}-{DATA_NAME}"
    path.write_text(json.dumps(data, indent=1) + "\n")
    add_figures(data, record, each.name)


def add_figures(data: Mapping[str, Any], record: Record, load: str) -> None:
    """Add what a load's data say of each arm and of its ratio to stock."""
    for name in _FIGURES:
        for arm, found in data["arms"].items():
            values = [seed[name] for seed in found["by_seed"].values() if seed.get(name)]
            record.add(f"{name}, {load}, {arm}", "1/s" if name == "tokens_per_s" else "s", values)
        for arm, ratios in data["over_stock"].items():
            values = list(ratios.get(name, {}).get("by_seed", {}).values())
            record.add(f"{name}, {load}, {arm} over stock", "", values)


def _check(run: ArmRun, log: Path) -> None:
    for played in run.seeds:
        failures = describe_failures(played.records)
        if failures is not None:
            raise BenchError(f"arm {run.name}: {failures}; see {log}")


def _loads(
    context: Context, load: Load, folder: Path, remaining_s: Callable[[], float]
) -> list[_Load]:
    if context.sized.is_dummy:
        # Lengths are given. What is worth most comes first, should the time be short.
        if context.rehearse:
            return [_sized_load("busy", _REHEARSED_RATE, (SEED,), 2.0, _REHEARSED_MOST)]
        rate = bearable_by_cost(context.folder / "cost.yaml")
        return [
            _sized_load("busy", rate, (SEED,), _TRACE_S),
            _sized_load("quiet", rate / 2, (SEED,), _TRACE_S * 3 / 4),
            _sized_load("busy-again", rate, (SEED + 1,), _TRACE_S),
        ]
    if context.rehearse:
        mix = Mix(requests=6, rate_per_s=3.0, max_tokens=128)
        return [_Load("busy", str(mix), {SEED: make_trace(mix, SEED)})]
    console = Console(quiet=True)
    rate, _ = bearable_rate(context.sized.settings, load, CAPACITY_SHARE, folder, console)
    mix = Mix(requests=160, rate_per_s=rate)
    of_seed = 3 * (mix.requests / mix.rate_per_s + _TAIL_S)
    left_s = remaining_s() - 2 * _START_S
    number = int(max(1.0, min(float(_MOST_SEEDS), left_s / of_seed)))
    seeds = range(SEED, SEED + number)
    return [_Load("busy", str(mix), {seed: make_trace(mix, seed) for seed in seeds})]


def _sized_load(
    name: str,
    rate: float,
    seeds: Sequence[int],
    seconds: float,
    most: tuple[int, int, int] = _MOST,
) -> _Load:
    number = round(rate * seconds)
    words = (
        f"{name}: {number} requests of {WORKLOAD}, {rate:.1f} per second, prompts of at most "
        f"{most[0]}, thoughts of at most {most[1]} and answers of at most {most[2]} tokens."
    )
    return _Load(name, words, {seed: sized_trace(number, rate, seed, most) for seed in seeds})


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
