"""``meridian bench probe-micro``: what a probe costs the CPU, by its context."""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from meridian_patch.bench.interrupts import end_like_ctrl_c
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.options import read_whole

FIGURES = "probe-micro.json"
RUNNERS = {"v1": False, "v2": True}


def add_probe_micro(benches: Any) -> None:
    """Add ``probe-micro`` to the benches."""
    micro = benches.add_parser("probe-micro", help="what a probe costs the CPU, by its context")
    micro.add_argument("--context", default="1000,8000,32000", help="tokens of the probed thoughts")
    micro.add_argument("--rounds", default="100", help="probes per context")
    micro.add_argument("--out", type=Path, default=Path("out/bench/probe-micro"), help="folder")
    micro.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    """Measure what a probe adds to CPU time, print the table and write probe-micro.json.

    Raises:
        BenchError: a wrong argument.
    """
    contexts = [read_whole("--context", text) for text in parsed.context.split(",")]
    rounds = read_whole("--rounds", parsed.rounds)
    end_like_ctrl_c()
    rows = [row for name in RUNNERS for row in measure(name, contexts, rounds)]
    Console().print(_table(rows))
    parsed.out.mkdir(parents=True, exist_ok=True)
    report = {
        "provenance": "measured-cpu",
        "machine": str(describe_machine()),
        "rounds": rounds,
        "rows": rows,
    }
    (parsed.out / FIGURES).write_text(json.dumps(report, indent=1))
    return 0


def measure(runner: str, contexts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds that one probe adds to each call: medians of steps with it less without."""
    from meridian_patch.bench.micro.probe_times import CALLS, ProbeMicro

    micro = ProbeMicro(max(contexts), is_v2=RUNNERS[runner])
    rows = []
    for context in contexts:
        pairs = list(micro.measure(context, rounds))
        added = {
            call: 1e3 * (median(p[call] for _, p in pairs) - median(p[call] for p, _ in pairs))
            for call in CALLS
        }
        rows.append(
            {"runner": runner, "context": context, "added_ms": added, "all_ms": sum(added.values())}
        )
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    calls = list(rows[0]["added_ms"])
    table = Table("runner", "context", *calls, "all", title="CPU time that a probe adds, ms")
    for row in rows:
        figures = [*row["added_ms"].values(), row["all_ms"]]
        table.add_row(row["runner"], f"{row['context']:,}", *(f"{ms:.2f}" for ms in figures))
    return table
