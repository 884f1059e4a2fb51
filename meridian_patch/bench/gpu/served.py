"""Servers of the suite: no host synchronisation, the lag of a close, and stock beside patched."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from meridian_patch.bench.arms import STOCK, override
from meridian_patch.bench.gpu.suite import Context, Record
from meridian_patch.bench.interrupts import EXIT_INTERRUPTED
from meridian_patch.bench.served.arms import (
    KNOWN_ARMS,
    PATCHED,
    STOCK_AGAIN,
    arm_environment,
)
from meridian_patch.bench.served.capacity import CAPACITY_SHARE, bearable_rate
from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.load import Load
from meridian_patch.bench.served.metrics import read_counters
from meridian_patch.bench.served.report import DATA_NAME
from meridian_patch.bench.served.run import Comparison, describe_failures, run_comparison
from meridian_patch.bench.served.server import ServerProcess, ServerSettings, pick_port
from meridian_patch.bench.served.workload import Mix, ServedRequest, make_trace
from meridian_patch.errors import BenchError

# Load-bearing: vLLM reads this variable, and says these words where it finds a synchronisation.
SYNC_VARIABLE = "VLLM_GPU_SYNC_CHECK"
SYNC_WORDS = "GPU<->CPU sync detected"
_SEED = 31
_GAPS = (1, 4, 32)
_REHEARSED_GAPS = (1,)
# Context of the servers whose requests run into its end.
_CONTEXT, _REHEARSED_CONTEXT = 4096, 192
_CAPS, _REHEARSED_CAPS = range(64, 128, 2), range(12, 28, 4)
_MEMORY_OF_THREE = 0.28
# What a server takes to start, and a trace to end behind its last arrival.
_START_S, _TAIL_S = 120.0, 20.0
# Less time than a control run takes.
_LEAST_S = 60.0
_RATIOS = (
    "ttfat_mean_s",
    "ttft_p50_s",
    "answer_itl_p50_s",
    "answer_itl_p99_s",
    "answer_gap_max_s",
    "tokens_per_s",
)


def run_sync_check(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """Serve with vLLM's check for synchronisations set to ``error``, probing at every gap.

    Some requests think into the end of the context, where a probe has no room.

    Raises:
        BenchError: a synchronisation was found, a request failed, or nothing was probed.
    """
    gaps = _REHEARSED_GAPS if context.rehearse else _GAPS
    for gap in gaps:
        log = context.folder / f"sync-check-{gap}.log"
        gaps_in_tokens = {"exit.probe_min_gap_tokens": gap, "exit.probe_max_gap_tokens": gap}
        env = {"MERIDIAN_PATCH": "1", **override(gaps_in_tokens)}
        try:
            found = _serve_checked(context, env, log, remaining_s())
        except BenchError:
            record.notes.append(_what_stock_does(context, remaining_s()))
            raise
        measured = found["probes_measured"]
        record.add(f"probes measured, a gap of {gap}", "", [measured])
        record.add(f"probes lost, a gap of {gap}", "", [found["probes_lost"]])
        if not measured:
            raise BenchError(f"no probe was measured at a gap of {gap} tokens; see {log}")
        failures = found["policy_exceptions"]
        if failures:
            raise BenchError(f"{failures:.0f} steps failed in our code; see {log}")
    if context.accelerator is None:
        record.notes.append(f"{SYNC_VARIABLE} does nothing without CUDA.")
    return f"no synchronisation, no failed step at gaps of {', '.join(map(str, gaps))} tokens"


def _serve_checked(
    context: Context, env: Mapping[str, str], log: Path, limit_s: float
) -> dict[str, float]:
    """Counters of a server that served problems and runaways under the check."""
    whole = {SYNC_VARIABLE: "error", **env}
    with _server(context, _with_context(context), whole, log, limit_s) as (server, client):
        records: list[RequestRecord] = []
        client.play(_with_runaways(context, client), records, server.check_alive)
        found = read_counters(client.metrics_text())
    _check_requests(records, log)
    check_log(log)
    return found


def _what_stock_does(context: Context, limit_s: float) -> str:
    """Play the same requests on stock vLLM and say whether it fails, too."""
    if limit_s < _LEAST_S:
        return "There was no time to try the same requests on stock vLLM."
    log = context.folder / "sync-check-stock.log"
    try:
        _serve_checked(context, KNOWN_ARMS[STOCK].environment, log, limit_s)
    except BenchError as error:
        return f"Stock vLLM fails on the same requests, too: {error}"
    return "Stock vLLM serves the same requests under the same check."


def run_close_lag(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """Close thoughts at a cap of tokens and read from the trace where they ended.

    Raises:
        BenchError: a request failed, or no thought was closed.
    """
    caps = _REHEARSED_CAPS if context.rehearse else _CAPS
    log, trace = context.folder / "close-lag.log", context.folder / "close-lag.jsonl"
    trace.unlink(missing_ok=True)
    env = {"MERIDIAN_PATCH": "1", **override({"exit.mode": "enforce", "exit.trace": trace})}
    problems = _problems(context, len(caps), max(caps) * 2)
    requests = [
        replace(problem, arrival_s=0.0, extra=_extra(context, cap))
        for problem, cap in zip(problems, caps, strict=True)
    ]
    with _server(context, _with_context(context), env, log, remaining_s()) as (server, client):
        alone: list[RequestRecord] = []
        for request in requests[: len(requests) // 2]:
            client.play([request], alone, server.check_alive)
        num_alone = len(close_lags(trace))
        together: list[RequestRecord] = []
        client.play(requests, together, server.check_alive)
    _check_requests([*alone, *together], log)
    lags = close_lags(trace)
    record.add("tokens from a due close to the thought's end, one request", "", lags[:num_alone])
    record.add("tokens from a due close to the thought's end, batch", "", lags[num_alone:])
    if not lags:
        raise BenchError(f"no thought of {len(alone) + len(together)} was closed; see {trace}")
    record.notes.append(
        "Counted from the token at which the close was due to the end of the thought, the forced "
        "boundary included; calibration must expect as much."
    )
    return f"{len(lags)} thoughts closed, {median(lags):g} tokens late in the median"


def run_comparison_part(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """Stock, the same stock again, and patched: all up at once, the same traces in turn.

    Raises:
        BenchError: a server or a request failed.
    """
    folder = context.folder / "served"
    folder.mkdir(parents=True, exist_ok=True)
    settings = context.settings
    if context.accelerator is not None:
        memory = ("--gpu-memory-utilization", str(_MEMORY_OF_THREE))
        settings = replace(settings, extra=(*settings.extra, *memory))
    with (folder / "console.log").open("w") as log:
        console = Console(file=log)
        load = Load(request_limit_s=max(30.0, remaining_s()))
        mix, seeds = _load_of(context, settings, load, folder, console, remaining_s)
        traces = {seed: _thinking(context, make_trace(mix, seed)) for seed in seeds}
        comparison = Comparison(
            arms=[KNOWN_ARMS[name] for name in (STOCK, STOCK_AGAIN, PATCHED)],
            settings=settings,
            traces=traces,
            workload=str(mix),
            load=load,
            port=0,
            folder=folder,
            command=context.command,
        )
        code = run_comparison(comparison, console)
    read_comparison(folder / DATA_NAME, record)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise BenchError(f"an arm or a request failed; see {folder / 'console.log'}")
    return f"{len(seeds)} traces of {mix.requests} requests on each of three servers"


def _load_of(
    context: Context,
    settings: ServerSettings,
    load: Load,
    folder: Path,
    console: Console,
    remaining_s: Callable[[], float],
) -> tuple[Mix, list[int]]:
    """A rate that the machine can serve, and seeds of as many traces as there is time for."""
    if context.rehearse:
        return Mix(requests=6, rate_per_s=3.0, max_tokens=128), [_SEED]
    rate, _ = bearable_rate(settings, load, CAPACITY_SHARE, folder, console)
    mix = Mix(requests=160, rate_per_s=rate)
    of_seed = 3 * (mix.requests / mix.rate_per_s + _TAIL_S)
    number = int(max(1.0, min(5.0, (remaining_s() - 3 * _START_S) / of_seed)))
    return mix, list(range(_SEED, _SEED + number))


def read_comparison(path: Path, record: Record) -> None:
    """Figures of each arm, and ratios to stock with their spread over traces."""
    if not path.is_file():
        return
    data = json.loads(path.read_text())
    for name in _RATIOS:
        for arm, found in data["arms"].items():
            values = [seed[name] for seed in found["by_seed"].values() if seed.get(name)]
            record.add(f"{name}, {arm}", "1/s" if name == "tokens_per_s" else "s", values)
        for arm, ratios in data["over_stock"].items():
            values = list(ratios.get(name, {}).get("by_seed", {}).values())
            record.add(f"{name}, {arm} over stock", "", values)
    record.notes.append("stock-again over stock is what two equal servers differ by.")


@contextmanager
def _server(
    context: Context, settings: ServerSettings, env: Mapping[str, str], log: Path, limit_s: float
) -> Iterator[tuple[ServerProcess, Client]]:
    """A server with an environment of its own."""
    whole = arm_environment(env, context.base_env)
    port = pick_port()
    with ServerProcess(settings, whole, log, port, start_limit_s=limit_s) as server:
        server.wait_until_healthy()
        yield server, Client(server.url, settings.served_name, request_limit_s=max(30.0, limit_s))


def _with_context(context: Context) -> ServerSettings:
    tokens = _REHEARSED_CONTEXT if context.rehearse else _CONTEXT
    options = ("--max-model-len", str(tokens))
    return replace(context.settings, extra=(*context.settings.extra, *options))


def _problems(context: Context, number: int, max_tokens: int) -> list[ServedRequest]:
    """Hard problems at once, without earlier turns."""
    mix = Mix(number, 100.0, history_share=0.0, hard_share=1.0, max_tokens=max_tokens)
    return _thinking(context, make_trace(mix, _SEED))


def _thinking(context: Context, trace: Sequence[ServedRequest]) -> list[ServedRequest]:
    """Bound thoughts by vLLM's budget where random weights would never end them."""
    if not context.is_dummy:
        return list(trace)
    return [
        replace(
            request,
            max_tokens=256 + 128,
            extra={"thinking_token_budget": 64 + 37 * place % 192, "ignore_eos": True},
        )
        for place, request in enumerate(trace)
    ]


def _extra(context: Context, cap: int) -> dict[str, Any]:
    asked = {"meridian_exit": "enforce", "meridian_max_think_tokens": cap}
    return {"vllm_xargs": asked} | ({"ignore_eos": True} if context.is_dummy else {})


def _with_runaways(context: Context, client: Client) -> list[ServedRequest]:
    """Problems, and thoughts that may not end before the context does."""
    number = 3 if context.rehearse else 16
    problems = _problems(context, number, 64 if context.rehearse else 1024)
    *_, end_id = client.end_marker()
    runaway = {
        "logit_bias": {str(end_id): -100},
        "ignore_eos": True,
        "max_tokens": None,
        # Else only a sample of the thoughts is probed. Stock vLLM does not read it.
        "vllm_xargs": {"meridian_exit": "observe"},
    }
    return [
        *problems,
        *(replace(p, id=f"{p.id}-runaway", extra=runaway) for p in problems[: number // 2 + 1]),
    ]


def _check_requests(records: Sequence[RequestRecord], log: Path) -> None:
    failures = describe_failures(records)
    if failures is not None:
        check_log(log)
        raise BenchError(f"{failures}; see {log}")
    for record in records:
        if record.request.id.endswith("-runaway") and record.finish_reason != "length":
            raise BenchError(
                f"request {record.request.id} ended with {record.finish_reason!r}, expected "
                "'length' at the end of the context"
            )


def check_log(log: Path) -> None:
    """Raise BenchError for a synchronisation: our guard catches it, so the server goes on."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if SYNC_WORDS in line]
    if lines:
        raise BenchError(f"{len(lines)} synchronisations, the first: {lines[0]}; see {log}")


def close_lags(trace: Path) -> list[float]:
    """Tokens from where closes were due to where their thoughts ended, in the order ended."""
    lines = trace.read_text().splitlines() if trace.is_file() else []
    ends = [event for event in map(json.loads, lines) if event["event"] == "end"]
    return [
        float(event["think_tokens"] - event["verdict"]["think_tokens"])
        for event in ends
        if event["verdict"] and event["reason"] == event["verdict"]["reason"]
    ]
