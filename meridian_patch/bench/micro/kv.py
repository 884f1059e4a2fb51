"""``meridian bench kv-micro``: what the KV tiers cost per operation, against stock."""

import gc
import json
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.micro.kv_times import BLOCKS, PLAIN, REQUESTS, STOCK, THINKING, KVMicro

TOTAL = "all four"
FIGURES = "kv-micro.json"
# Until the heap looks as it will from then on.
WARM_UP_ROUNDS = 5


def run(rounds: int, out: Path, *, in_order: bool) -> int:
    """Time ``rounds`` interleaved rounds; print a table and write the same figures as JSON.

    Requests finish in a random order, or, ``in_order``, in the one they came in.
    The ratio of a round is taken within the round, so that a slow moment of the machine hits
    both of its sides.
    """
    console = Console()
    micro = KVMicro(in_order=in_order)
    seen: dict[str, list[dict[str, float]]] = {STOCK: [], PLAIN: [], THINKING: []}
    # As vLLM does with its engine core: a collection would hit whichever side it comes in.
    gc.freeze()
    try:
        for _ in track(range(rounds + WARM_UP_ROUNDS), "rounds", console=console, transient=True):
            for name, seconds in micro.round():
                seen[name].append(seconds | {TOTAL: sum(seconds.values())})
    finally:
        gc.unfreeze()
    for rows in seen.values():
        del rows[:WARM_UP_ROUNDS]
    table = Table("operation", "stock, µs/request", PLAIN, THINKING)
    table.title = f"{REQUESTS} requests at once on {BLOCKS:,} blocks; median ratio (p20..p80)"
    figures = {}
    for operation in seen[STOCK][0]:
        stock_us = median(row[operation] for row in seen[STOCK]) * 1e6
        ratios = {arm: _ratios(seen, arm, operation) for arm in (PLAIN, THINKING)}
        figures[operation] = {"stock_us_per_request": stock_us} | ratios
        shown = [f"{r['p50']:.3f} ({r['p20']:.3f}..{r['p80']:.3f})" for r in ratios.values()]
        table.add_row(operation, f"{stock_us:.1f}", *shown)
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "provenance": "measured-cpu",
        "machine": str(describe_machine()),
        "rounds": rounds,
        "finish": "in order" if in_order else "random",
        "operations": figures,
    }
    (out / FIGURES).write_text(json.dumps(report, indent=1) + "\n")
    console.print(str(out / FIGURES), highlight=False)
    return 0


def _ratios(seen: dict[str, list[dict[str, float]]], arm: str, operation: str) -> dict[str, float]:
    pairs = zip(seen[arm], seen[STOCK], strict=True)
    ratios = [ours[operation] / stock[operation] for ours, stock in pairs]
    return {f"p{q}": float(np.percentile(ratios, q)) for q in (20, 50, 80)}
