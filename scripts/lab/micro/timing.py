"""Interleaved timings: all sides run in every round, so that a slow moment hits each of them."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.report import write_json

# By operation.
Seconds = dict[str, float]
# By side, one item per round; rounds of equal index belong together.
Rounds = dict[str, list[Seconds]]


def take_rounds(
    run: Callable[[], Iterable[tuple[str, Seconds]]], count: int, on_round: Callable[[], None]
) -> Rounds:
    """Time ``count`` rounds without garbage collection.

    Args:
        run: one round; yields each side and what it took.
        count: of rounds.
        on_round: called after each.
    """
    rounds: Rounds = {}
    # vLLM freezes its engine core, too. A collection would hit the side that happens to run.
    gc.collect()
    gc.freeze()
    try:
        for _ in range(count):
            for side, seconds in run():
                rounds.setdefault(side, []).append(seconds)
            on_round()
    finally:
        gc.unfreeze()
    return rounds


def time_calls(owner: Any, name: str, take: Callable[[float], None]) -> None:
    """Call ``take`` with the CPU seconds of each call of a method.

    CPU time of the thread is what the call would take if no other process ran.

    Args:
        owner: an object, or a class for all its objects.
        name: of the method.
        take: called after each call.
    """
    original = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        result = original(*args, **kwargs)
        take(time.thread_time() - start)
        return result

    setattr(owner, name, timed)


def column(rounds: Sequence[Seconds], operation: str) -> NDArray[np.float64]:
    """Microseconds of one operation, by round."""
    return np.array([seconds[operation] for seconds in rounds]) * 1e6


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Median, and the range that leaves a fifth out on either side."""
    return {f"p{q}": float(np.percentile(values, q)) for q in (20, 50, 80)}


def show(shares: dict[str, float] | None, form: str) -> str:
    """A spread as text; empty for None."""
    if shares is None:
        return ""
    middle, low, high = (format(shares[name], form) for name in ("p50", "p20", "p80"))
    return f"{middle} ({low}..{high})"


def make_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of figures, aligned to the right."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def write_figures(console: Console, path: Path, figures: dict[str, Any]) -> None:
    """Write figures of this machine as JSON and print the path."""
    origin = {"provenance": "measured-cpu", "machine": str(describe_machine())}
    write_json(path, origin | figures)
    console.print(str(path), highlight=False)
