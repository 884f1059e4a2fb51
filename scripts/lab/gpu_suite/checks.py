"""Parts about what requests get: equal texts, no host synchronisation, the lag of a close."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from gpu_suite.servers import (
    check_records,
    launched,
    problems,
    serving,
)
from gpu_suite.suite import HALF_OF_THE_GPU, Context, Record, Served
from meridian_patch.bench.arms import STOCK, override
from meridian_patch.bench.served.arms import KNOWN_ARMS, PATCHED
from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.metrics import read_counters
from meridian_patch.bench.served.server import ServerProcess
from meridian_patch.bench.served.workload import ServedRequest
from meridian_patch.errors import BenchError

# Of a finding of the doctor.
_FAIL = "fail"
# Token ids by request.
Texts = dict[str, tuple[int, ...]]

# Load-bearing: vLLM reads this variable, and says these words where it finds a synchronisation.
SYNC_VARIABLE = "VLLM_GPU_SYNC_CHECK"
SYNC_WORDS = "GPU<->CPU sync detected"
_GAPS = (1, 4, 32)
# Where there is no time for a server for each.
_FEW_GAPS, _REHEARSED_GAPS = (4,), (1,)
# Context of the servers whose requests run into its end.
_CONTEXT, _REHEARSED_CONTEXT = 4096, 192
_CAPS, _REHEARSED_CAPS = range(64, 128, 2), range(12, 28, 4)
# With a given pool vLLM profiles no memory, so that several servers may start at once.
_TINY_POOL = ("--gpu-memory-utilization", "0.08", "--kv-cache-memory-bytes", str(2**31))
_REQUESTS, _REHEARSED_REQUESTS = 32, 4
# Requests that are also sent alone, where no batch can change a text.
_ALONE = 8
# Load-bearing: vLLM's words in a server's log, by what they say is in use.
WORDS = {
    "the V2 runner": re.compile("Using V2 Model Runner"),
    "CUDA graphs": re.compile("Graph capturing finished"),
    "asynchronous scheduling": re.compile(r"meridian_patch live in EngineCore.*AsyncPhase"),
}
# Less time than a control run takes.
_LEAST_S = 60.0


def run_defaults(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """Serve with all defaults beside stock, compare the texts, and ask the doctor.

    On a GPU a greedy text may depend on what else is in its batch, so a different text is a figure
    and no failure.

    Raises:
        BenchError: a server or a request failed, or the doctor reports a failure.
    """
    served = context.thinking
    if context.accelerator is not None:
        served = served.with_options(*(_TINY_POOL if served.is_tiny else HALF_OF_THE_GPU))
    number = _REHEARSED_REQUESTS if context.rehearse else _REQUESTS
    asked = problems(served, number, 128 if context.rehearse else 1024)
    texts: dict[str, dict[str, Texts]] = {}
    with ExitStack() as up:
        started = {}
        for arm in (STOCK, PATCHED):
            log = context.folder / f"defaults-{arm}.log"
            env = KNOWN_ARMS[arm].environment
            started[arm] = up.enter_context(launched(context, served, env, log, remaining_s()))
            if not served.is_tiny:
                # vLLM's profile of the GPU's memory counts a neighbour's as its own.
                started[arm][0].wait_until_healthy()
        for arm, (server, client) in started.items():
            server.wait_until_healthy()
            log = context.folder / f"defaults-{arm}.log"
            texts[arm] = _texts(asked, server, client, log)
        findings = _ask_doctor(context, started[PATCHED][1].url, remaining_s())
    for name, wanted in texts[STOCK].items():
        equal = sum(texts[PATCHED][name][request] == text for request, text in wanted.items())
        record.add(f"texts compared with stock's, {name}", "", [len(wanted)])
        record.add(f"texts equal to stock's, {name}", "", [equal])
    log_text = (context.folder / f"defaults-{PATCHED}.log").read_text(errors="replace")
    for what, words in WORDS.items():
        record.add(f"{what} in use", "", [bool(words.search(log_text))])
    _judge(findings, record)
    return f"{number} requests on each of two servers, {len(findings)} findings of the doctor"


def _texts(
    asked: Sequence[ServedRequest], server: ServerProcess, client: Client, log: Path
) -> dict[str, Texts]:
    """Token ids by request, of requests that were sent alone and of all at once."""
    alone: list[RequestRecord] = []
    for request in asked[: min(_ALONE, len(asked) // 2)]:
        client.play([replace(request, arrival_s=0.0)], alone, server.check_alive)
    together: list[RequestRecord] = []
    client.play(asked, together, server.check_alive)
    check_records([*alone, *together], log)
    return {
        name: {each.request.id: tuple(each.token_ids) for each in records}
        for name, records in (("alone", alone), ("in a batch", together))
    }


def _judge(findings: Sequence[Mapping[str, Any]], record: Record) -> None:
    for state, count in sorted(Counter(each["state"] for each in findings).items()):
        record.add(f"doctor's findings, {state}", "", [count])
    failures = [each for each in findings if each["state"] == _FAIL]
    for each in failures:
        record.notes.append(f"doctor: {each['check']}: {each['found']}")
    if failures:
        raise BenchError(f"doctor reports {len(failures)} failures; the notes name them")


def _ask_doctor(context: Context, url: str, limit_s: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "meridian_patch.cli"]
    command += ["doctor", "--quick", "--json", "--url", url]
    try:
        run = subprocess.run(
            command,
            env=context.base_env,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(1.0, limit_s),
        )
        findings: list[dict[str, Any]] = json.loads(run.stdout)["findings"]
    except subprocess.TimeoutExpired:
        raise BenchError("doctor did not end in time") from None
    except (ValueError, KeyError):
        raise BenchError(f"doctor printed no findings: {run.stderr[-300:]}") from None
    return findings


def run_sync_check(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """Serve with vLLM's check for synchronisations set to ``error``, probing at every gap.

    Some requests think into the end of the context, where a probe has no room.

    Raises:
        BenchError: a synchronisation was found, a request failed, or nothing was probed.
    """
    gaps = _GAPS if remaining_s() >= len(_GAPS) * _LEAST_S else _FEW_GAPS
    gaps = _REHEARSED_GAPS if context.rehearse else gaps
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
    with serving(context, _short_of_context(context), whole, log, limit_s) as (server, client):
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
    asked = problems(context.thinking, len(caps), max(caps) * 2)
    requests = [
        replace(problem, arrival_s=0.0, extra=_extra(context, cap))
        for problem, cap in zip(asked, caps, strict=True)
    ]
    with serving(context, _short_of_context(context), env, log, remaining_s()) as (server, client):
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


def _short_of_context(context: Context) -> Served:
    tokens = _REHEARSED_CONTEXT if context.rehearse else _CONTEXT
    served = context.thinking.with_options("--max-model-len", str(tokens))
    has_neighbours = served.is_tiny and context.accelerator is not None
    return served.with_options(*_TINY_POOL) if has_neighbours else served


def _extra(context: Context, cap: int) -> dict[str, Any]:
    asked = {"meridian_exit": "enforce", "meridian_max_think_tokens": cap}
    return {"vllm_xargs": asked} | ({"ignore_eos": True} if context.thinking.is_dummy else {})


def _with_runaways(context: Context, client: Client) -> list[ServedRequest]:
    """Problems, and thoughts that may not end before the context does."""
    number = 3 if context.rehearse else 16
    asked = problems(context.thinking, number, 64 if context.rehearse else 1024)
    *_, end_id = client.end_marker()
    runaway = {
        "logit_bias": {str(end_id): -100},
        "ignore_eos": True,
        "max_tokens": None,
        # Else only a sample of the thoughts is probed. Stock vLLM does not read it.
        "vllm_xargs": {"meridian_exit": "observe"},
    }
    return [
        *asked,
        *(replace(p, id=f"{p.id}-runaway", extra=runaway) for p in asked[: number // 2 + 1]),
    ]


def _check_requests(records: Sequence[RequestRecord], log: Path) -> None:
    try:
        check_records(records, log)
    except BenchError:
        check_log(log)
        raise
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
