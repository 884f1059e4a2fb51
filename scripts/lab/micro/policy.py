"""``policy-micro``: what the policy costs per step, against stock."""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from meridian_patch.bench.interrupts import EXIT_INTERRUPTED
from meridian_patch.bench.progress import progress_bars
from meridian_patch.bench.simulated.lengths import (
    CHAT_ANSWER,
    CHAT_PROMPT,
    CHAT_THINK,
    draw_lengths,
)
from meridian_patch.errors import BenchError
from meridian_patch.replay.scheduler import read_template_tokens
from meridian_patch.replay.types import ReplayArm, ReplayRequest
from micro.deep_queue import DeepQueue
from micro.scheduler_times import OWN, PolicyMicro
from micro.timing import (
    Rounds,
    column,
    make_table,
    show,
    spread,
    take_rounds,
    write_figures,
)

STOCK, AGAIN = "stock", "stock again"
# No time budget: a long step must show as one. ANSWER_ITL_MS lets steps hold as much as stock's:
# otherwise a thousand prompts take minutes, and the arms' steps hold different work. All requests
# have the same level, so that none takes the seat of another.
ARMS = {
    name: {
        "MERIDIAN_PATCH_SET_POLICY__NAME": name,
        "MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US": "10000000",
        "MERIDIAN_PATCH_SET_POLICY__ANSWER_ITL_MS": "10000",
        "MERIDIAN_PATCH_SET_POLICY__LEVEL_TOKENS": "1000000",
        "MERIDIAN_PATCH_SET_KV__HISTORY": "strip",
    }
    for name in ("noop", "latency")
}
# The time budget as it ships; thinking requests are displaced early and often.
DEEP = {
    "MERIDIAN_PATCH_SET_POLICY__LEVEL_TOKENS": "200",
    "MERIDIAN_PATCH_SET_KV__HISTORY": "strip",
    "MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS": "[meridian_priority]",
}
DEEP_RUNNING, DEEP_SETTLING, DEEP_PREEMPTED = 64, 150, 40
HEADINGS = ("running", "waiting", "call", "arm", "p50", "p99", "extra over stock", "own")

TimingRow = dict[str, Any]


def run_policy_micro(
    running: Sequence[int], waiting: Sequence[int], deep: int, steps: int, seed: int, out: Path
) -> int:
    """Measure, print tables and write ``policy-micro.json``; 130 on Ctrl-C, with what is done.

    Args:
        running: requests that run; measured with each number of ``waiting``.
        waiting: requests that wait behind them.
        deep: requests behind a full KV pool, in front of which our operations are timed; 0: none.
        steps: measured steps per arm.
        seed: of the load.
        out: folder.

    Raises:
        BenchError: a pool was too small.
    """
    console = Console(markup=False, emoji=False)
    rows: list[TimingRow] = []
    operations: TimingRow = {}
    is_interrupted = False
    try:
        with progress_bars(console, transient=True) as progress:
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
        print("benches: interrupted, what was measured so far is written", file=sys.stderr)
    title = "CPU µs per step; extra over stock, of paired steps, and own: median (p20..p80)"
    console.print(make_table(title, HEADINGS, map(_cells, rows)))
    if operations:
        console.print(operations_table(operations))
    report = {"steps": steps, "seed": seed, "is_interrupted": is_interrupted, "rows": rows}
    write_figures(console, out / "policy-micro.json", report | {"deep_queue": operations})
    return EXIT_INTERRUPTED if is_interrupted else 0


def measure(
    running: int, waiting: int, steps: int, seed: int, on_step: Callable[[], None]
) -> Rounds:
    """Seconds of ``steps`` steps of every arm, all of them on the same load.

    Raises:
        BenchError: the pool was too small, so that the arms did different things.
    """
    # The second stock arm shows how far two equal arms differ.
    arms = [ReplayArm(STOCK), ReplayArm(AGAIN)]
    arms += [ReplayArm(name, True, values) for name, values in ARMS.items()]
    with closing(PolicyMicro(arms, running, waiting, ChatLoad(running, seed).draw)) as micro:
        micro.settle()
        seen = take_rounds(micro.step, steps, on_step)
    if micro.preemptions:
        raise BenchError(
            f"{micro.preemptions} requests were preempted with {running} running, so the arms "
            "did not do the same work; choose another --seed"
        )
    return {arm.name: seen[arm.name] for arm in arms}


def measure_operations(
    running: int, waiting: int, steps: int, seed: int, on_step: Callable[[], None]
) -> TimingRow:
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
    queue = DeepQueue(
        ReplayArm("latency", True, DEEP), running, waiting, ChatLoad(running, seed).draw
    )
    for _ in range(DEEP_SETTLING):
        queue.step()
    queue.preempt_for_room(DEEP_PREEMPTED)
    queue.forget()
    slow, preempted = queue.num_slow, [0]

    def step() -> tuple[()]:
        queue.step()
        preempted.append(queue.num_preempted_for_room)
        return ()

    take_rounds(step, steps, on_step)
    taken = {name: np.array(seconds) * 1e6 for name, seconds in queue.seconds.items() if seconds}
    return {
        "running": queue.num_running,
        "waiting": queue.num_waiting,
        "most_displaced": max(preempted),
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


class ChatLoad:
    """Chats; the first ones begin somewhere in the middle of their output.

    Args:
        running: how many begin so.
        seed: of lengths, progress and tokens.
    """

    def __init__(self, running: int, seed: int) -> None:
        self._running = running
        self._seed = seed

    def draw(self, number: int) -> ReplayRequest:
        """The request of this number, always the same."""
        rng = np.random.default_rng((self._seed, number))
        template = read_template_tokens()
        prompt, think, answer = (
            int(draw_lengths(fit, rng, 1)[0]) for fit in (CHAT_PROMPT, CHAT_THINK, CHAT_ANSWER)
        )
        # Finished output counts as prompt. A request that answers first thinks for one token.
        done = int(rng.random() * (think + answer)) if number < self._running else 0
        answer = max(1, answer - max(0, done - think))
        think = max(1, think - done)
        text = rng.integers(template.content_ids, size=prompt + done).tolist()
        word = int(rng.integers(template.content_ids))
        return ReplayRequest(
            request_id=f"request-{number}",
            prompt=[*text, template.think_start],
            output=[word] * think + [template.think_end] + [word] * answer + [template.turn_end],
            answer_start=think + 1,
        )


def figures(running: int, waiting: int, seen: Rounds) -> list[TimingRow]:
    """Per arm and call, the cost in microseconds and what is on top of stock's.

    The difference is taken within each step. Our own lines are timed by themselves, too: they take
    a fiftieth of the call around them, which the difference of two calls does not show. The time
    that timing itself takes, measured as stock's own lines, is subtracted.
    """
    rows = []
    for name, steps in seen.items():
        for call, own_part in OWN.items():
            ours = column(steps, call)
            row: TimingRow = {"running": running, "waiting": waiting, "arm": name, "call": call}
            row |= {"p50_us": float(np.median(ours)), "p99_us": float(np.percentile(ours, 99))}
            if name != STOCK:
                row["extra_us"] = spread(ours - column(seen[STOCK], call))
            if name in ARMS:
                timing = np.median(column(seen[AGAIN], own_part))
                row["own_us"] = spread(column(steps, own_part) - timing)
            rows.append(row)
    return rows


def _cells(row: TimingRow) -> list[str]:
    """A row of figures as text, by ``HEADINGS``."""
    cells = [str(row[name]) for name in ("running", "waiting", "call", "arm")]
    cells += [f"{row[name]:.0f}" for name in ("p50_us", "p99_us")]
    return cells + [show(row.get(name), ".0f") for name in ("extra_us", "own_us")]


def operations_table(deep: TimingRow) -> Table:
    """What each operation takes in front of a deep queue."""
    title = (
        f"CPU µs per call: {deep['running']} running, {deep['waiting']} waiting, up to "
        f"{deep['most_displaced']} displaced; {deep['slow']} over the time budget, 0 dropped"
    )
    rows = [
        (name, str(row["calls"]), *(f"{row[key]:.1f}" for key in ("p50_us", "p99_us", "max_us")))
        for name, row in deep["operations"].items()
    ]
    return make_table(title, ("operation", "calls", "p50", "p99", "max"), rows)
