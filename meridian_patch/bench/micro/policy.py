"""``meridian bench policy-micro``: what the policy costs per step, against stock."""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from meridian_patch.bench.interrupts import end_like_ctrl_c
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.options import read_whole
from meridian_patch.bench.simulated.lengths import (
    CHAT_ANSWER,
    CHAT_PROMPT,
    CHAT_THINK,
    draw_lengths,
)
from meridian_patch.errors import BenchError

STOCK, AGAIN = "stock", "stock again"
# Without the time budget's fallback: a step that took long is to be seen as that.
ARMS = {
    name: {
        "MERIDIAN_PATCH_SET_POLICY__NAME": name,
        "MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US": "10000000",
        # Steps are cut by the same sums, but to as much as stock's: else the prompts of a thousand
        # requests take minutes to come in, and the arms' steps hold different work.
        "MERIDIAN_PATCH_SET_POLICY__ANSWER_ITL_MS": "10000",
        "MERIDIAN_PATCH_SET_KV__HISTORY": "strip",
    }
    for name in ("noop", "latency")
}
# With the time budget as it ships; thoughts make room early and often.
DEEP = {
    "MERIDIAN_PATCH_SET_POLICY__SHARING_MIN_TOKENS": "200",
    "MERIDIAN_PATCH_SET_POLICY__SHARING_OVERHEAD": "1.0",
    "MERIDIAN_PATCH_SET_KV__HISTORY": "strip",
}
DEEP_RUNNING, DEEP_SETTLING, DEEP_DISPLACED = 64, 150, 40
FIGURES = "policy-micro.json"
EXIT_INTERRUPTED = 130

Row = dict[str, Any]
# Per arm and call, the seconds of each step; steps of equal index belong together.
Seen = dict[str, list[dict[str, float]]]


def run_policy_micro(parsed: argparse.Namespace) -> int:
    """Measure and print; 130 on Ctrl-C, with what was measured written.

    Raises:
        BenchError: a wrong argument, or a pool that was too small.
    """
    running = [read_whole("--running", text) for text in parsed.running.split(",")]
    waiting = [
        0 if text == "0" else read_whole("--waiting", text) for text in parsed.waiting.split(",")
    ]
    steps = read_whole("--steps", parsed.steps)
    seed = read_whole("--seed", parsed.seed)
    deep = 0 if parsed.deep == "0" else read_whole("--deep", parsed.deep)
    end_like_ctrl_c()
    console = Console()
    rows: list[Row] = []
    parsed.out.mkdir(parents=True, exist_ok=True)
    is_interrupted = False
    operations: Row = {}
    try:
        with Progress(console=console, transient=True, refresh_per_second=2) as progress:
            total = len(running) * len(waiting) * steps + (steps if deep else 0)
            task = progress.add_task("steps", total=total)

            def advance() -> None:
                progress.advance(task)

            # First, with nothing else in the process: the schedulers of the other measurements
            # would push what it measures out of the caches.
            if deep:
                operations = measure_operations(DEEP_RUNNING, deep, steps, seed, advance)
            for many in running:
                for behind in waiting:
                    rows += figures(many, behind, measure(many, behind, steps, seed, advance))
    except KeyboardInterrupt:
        is_interrupted = True
        print("meridian: interrupted, what was measured so far is written", file=sys.stderr)
    console.print(table_of(rows))
    if operations:
        console.print(operations_table(operations))
    report = {
        "provenance": "measured-cpu",
        "machine": str(describe_machine()),
        "steps": steps,
        "seed": seed,
        "is_interrupted": is_interrupted,
        "rows": rows,
        "deep_queue": operations,
    }
    (parsed.out / FIGURES).write_text(json.dumps(report, indent=1) + "\n")
    console.print(str(parsed.out / FIGURES), highlight=False)
    return EXIT_INTERRUPTED if is_interrupted else 0


def measure(running: int, waiting: int, steps: int, seed: int, on_step: Callable[[], None]) -> Seen:
    """Seconds of ``steps`` steps of every arm, all of them on the same load.

    Raises:
        BenchError: the pool was too small, so that the arms did different things.
    """
    from meridian_patch.bench.micro.scheduler_times import PolicyMicro
    from meridian_patch.replay.types import ReplayArm

    # The second stock arm shows how far two equal arms differ.
    arms = [ReplayArm(STOCK), ReplayArm(AGAIN)]
    arms += [ReplayArm(name, True, values) for name, values in ARMS.items()]
    micro = PolicyMicro(arms, running, waiting, Load(running, seed).draw)
    micro.settle()
    seen: Seen = {arm.name: [] for arm in arms}
    # As vLLM does with its engine core: a collection would hit whichever arm it comes in.
    gc.collect()
    gc.freeze()
    try:
        for _ in range(steps):
            for name, seconds in micro.step():
                seen[name].append(seconds)
            on_step()
    finally:
        gc.unfreeze()
    if micro.preemptions:
        raise BenchError(
            f"{micro.preemptions} requests were preempted with {running} running, so the arms "
            "did not do the same work; choose another --seed"
        )
    return seen


def measure_operations(
    running: int, waiting: int, steps: int, seed: int, on_step: Callable[[], None]
) -> Row:
    """Measure the CPU time of each of our scheduler operations in front of a deep queue.

    Args:
        running: requests that run.
        waiting: requests that wait behind them.
        steps: to be timed.
        seed: of the load.
        on_step: called after each timed step.

    Returns:
        ``running``, ``waiting``, ``most_displaced``, ``slow`` (plans over the time budget), and
        ``operations``: by name the calls, and p50, p99 and maximum in microseconds.
    """
    from meridian_patch.bench.micro.deep_queue import DeepQueue
    from meridian_patch.replay.types import ReplayArm

    queue = DeepQueue(ReplayArm("latency", True, DEEP), running, waiting, Load(running, seed).draw)
    for _ in range(DEEP_SETTLING):
        queue.step()
    queue.displace(DEEP_DISPLACED)
    queue.forget()
    slow, displaced = queue.num_slow, 0
    gc.collect()
    gc.freeze()
    try:
        for _ in range(steps):
            queue.step()
            displaced = max(displaced, queue.num_displaced)
            on_step()
    finally:
        gc.unfreeze()
    taken = {name: np.array(seconds) * 1e6 for name, seconds in queue.seconds.items()}
    return {
        "running": queue.num_running,
        "waiting": queue.num_waiting,
        "most_displaced": displaced,
        "slow": queue.num_slow - slow,
        "operations": {
            name: {
                "calls": len(us),
                "p50_us": float(np.median(us)),
                "p99_us": float(np.percentile(us, 99)),
                "max_us": float(us.max()),
            }
            for name, us in taken.items()
        },
    }


class Load:
    """Chats of which the first are met somewhere in the middle of their output.

    Args:
        running: how many of them.
        seed: of lengths, progress and tokens.
    """

    def __init__(self, running: int, seed: int) -> None:
        self._running = running
        self._seed = seed

    def draw(self, number: int) -> Any:
        """The request of this number, always the same."""
        from meridian_patch.replay.scheduler import read_markers
        from meridian_patch.replay.types import ReplayRequest

        rng = np.random.default_rng((self._seed, number))
        markers = read_markers()
        prompt, think, answer = (
            int(draw_lengths(fit, rng, 1)[0]) for fit in (CHAT_PROMPT, CHAT_THINK, CHAT_ANSWER)
        )
        # What is done already counts as prompt; a request that answers thinks for one token more.
        done = int(rng.random() * (think + answer)) if number < self._running else 0
        answer = max(1, answer - max(0, done - think))
        think = max(1, think - done)
        text = rng.integers(markers.content_ids, size=prompt + done).tolist()
        word = int(rng.integers(markers.content_ids))
        return ReplayRequest(
            request_id=f"request-{number}",
            prompt=[*text, markers.think_start],
            output=[word] * think + [markers.think_end] + [word] * answer + [markers.turn_end],
            answer_start=think + 1,
        )


def figures(running: int, waiting: int, seen: Seen) -> list[Row]:
    """Per arm and call, the cost in microseconds and what is on top of stock's.

    The difference is taken within each step, so that a slow moment of the machine hits both sides.
    What our own lines take is timed by itself, too: it is a fiftieth of the call around it, and the
    difference of two calls does not show it. What timing takes, as stock's own lines show, is off.
    """
    from meridian_patch.bench.micro.scheduler_times import OWN

    rows = []
    for name, steps in seen.items():
        for call, own_part in OWN.items():
            ours = np.array([step[call] for step in steps]) * 1e6
            stock = np.array([step[call] for step in seen[STOCK]]) * 1e6
            row = {
                "running": running,
                "waiting": waiting,
                "arm": name,
                "call": call,
                "p50_us": float(np.median(ours)),
                "p99_us": float(np.percentile(ours, 99)),
            }
            if name != STOCK:
                row["extra_us"] = {
                    f"p{q}": float(np.percentile(ours - stock, q)) for q in (20, 50, 80)
                }
            if name in ARMS:
                own = np.array([step[own_part] for step in steps]) * 1e6
                own -= np.median([step[own_part] for step in seen[AGAIN]]) * 1e6
                row["own_us"] = {f"p{q}": float(np.percentile(own, q)) for q in (20, 50, 80)}
            rows.append(row)
    return rows


def table_of(rows: list[Row]) -> Table:
    """The same for people."""
    table = Table(
        title="CPU µs per step; extra over stock, of paired steps, and own: median (p20..p80)"
    )
    for heading in ("running", "waiting", "call", "arm", "p50", "p99", "extra over stock", "own"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("running", "waiting", "call", "arm")),
            f"{row['p50_us']:.0f}",
            f"{row['p99_us']:.0f}",
            _shown(row.get("extra_us")),
            _shown(row.get("own_us")),
        )
    return table


def _shown(shares: dict[str, float] | None) -> str:
    if shares is None:
        return ""
    return f"{shares['p50']:.0f} ({shares['p20']:.0f}..{shares['p80']:.0f})"


def operations_table(deep: Row) -> Table:
    """What each operation takes in front of a deep queue."""
    table = Table(
        title=f"CPU µs per call: {deep['running']} running, {deep['waiting']} waiting, up to "
        f"{deep['most_displaced']} displaced; {deep['slow']} over the time budget, 0 dropped"
    )
    for heading in ("operation", "calls", "p50", "p99", "max"):
        table.add_column(heading, justify="right")
    for name, row in deep["operations"].items():
        shown = (f"{row[key]:.1f}" for key in ("p50_us", "p99_us", "max_us"))
        table.add_row(name, str(row["calls"]), *shown)
    return table
