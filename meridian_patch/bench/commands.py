"""``meridian bench``: comparisons that need no accelerator."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meridian_patch.bench.exit.command import add_exit
from meridian_patch.bench.exit_trace import add_exit_trace
from meridian_patch.bench.micro.policy_command import add_policy_micro
from meridian_patch.bench.micro.probe import add_probe_micro
from meridian_patch.bench.options import read_positive, read_seeds, read_whole
from meridian_patch.bench.served.command import add_serve
from meridian_patch.bench.served.conversation_command import add_served_turns
from meridian_patch.bench.simulated.command import add_lab
from meridian_patch.bench.simulated.fit_command import add_fit_cost
from meridian_patch.bench.simulated.validate_command import add_validate
from meridian_patch.errors import BenchError

if TYPE_CHECKING:
    from meridian_patch.bench.simulated.conversation_grid import Grid

Value = TypeVar("Value", int, float)

EXIT_INTERRUPTED = 130
# What --grid runs where an option is not given.
GRID_HISTORIES = "stripped,kept,tool-loop,plain"
GRID_POOLS = "100000,200000"
GRID_RATES = "0.15,0.3,0.6"


def add_bench(commands: Any) -> None:
    """Add ``bench`` to the subcommands of the ``meridian`` command."""
    bench = commands.add_parser("bench", help="comparisons with stock vLLM")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    turns = benches.add_parser(
        "turns",
        help="prefix hits over conversations, replayed on vLLM's real scheduler",
        description="Replays conversations of 2 to 8 turns on vLLM's real scheduler and KV cache "
        "manager, without a model and on a virtual clock. Options with a comma take several "
        "values; all combinations are run.",
    )
    turns.add_argument("--history", help="stripped, kept, tool-loop, plain (default: stripped)")
    turns.add_argument("--pool", help="KV pool in tokens (default: 100000)")
    turns.add_argument("--rate", help="conversations per second (default: 0.3)")
    turns.add_argument("--seeds", default="1", help="for example 1,2 or 11-15")
    turns.add_argument("--arms", help="comma list, 'stock' is always run (default: all main arms)")
    turns.add_argument("--conversations", default="100", help="per replay")
    turns.add_argument("--think-factor", default="1", help="makes thoughts this much longer")
    turns.add_argument("--cost", default=None, help="cost model: a packaged name, or a YAML file")
    turns.add_argument("--workers", default="2", help="processes")
    turns.add_argument("--out", type=Path, default=Path("out/bench/turns"), help="folder")
    turns.add_argument(
        "--grid",
        action="store_true",
        help=f"histories {GRID_HISTORIES}, pools {GRID_POOLS}, rates {GRID_RATES} where not given",
    )
    turns.set_defaults(run=_turns)
    add_serve(benches)
    add_fit_cost(benches)
    add_validate(benches)
    add_served_turns(benches)
    add_lab(benches)
    micro = benches.add_parser(
        "kv-micro", help="what the KV tiers cost per operation, on 100 000 blocks"
    )
    micro.add_argument("--rounds", default="15", help="interleaved rounds, ours and stock")
    micro.add_argument(
        "--in-order", action="store_true", help="requests finish in the order they came in"
    )
    micro.add_argument("--out", type=Path, default=Path("out/bench/kv-micro"), help="folder")
    micro.set_defaults(run=_kv_micro)
    add_policy_micro(benches)
    add_probe_micro(benches)
    add_exit_trace(benches)
    add_exit(benches)


def _kv_micro(parsed: argparse.Namespace) -> int:
    from meridian_patch.bench.micro.kv import run

    return run(read_whole("--rounds", parsed.rounds), parsed.out, in_order=parsed.in_order)


def _turns(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from meridian_patch.bench.progress import progress_bars
    from meridian_patch.bench.simulated.conversation_figures import summarise_turns
    from meridian_patch.bench.simulated.conversation_grid import run_grid
    from meridian_patch.bench.simulated.conversation_report import (
        TABLE_NOTE,
        TurnsOrigin,
        turns_tables,
        write_turns_report,
    )
    from meridian_patch.bench.simulated.cost import load_cost

    grid = _grid(parsed)
    workers = read_whole("--workers", parsed.workers)
    cost = load_cost(grid.cost)
    parsed.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    with progress_bars(console) as progress:
        task = progress.add_task("replays", total=sum(1 for _ in grid.jobs()))
        try:
            runs = run_grid(grid, workers, lambda _: progress.advance(task))
        except KeyboardInterrupt:
            print("meridian: interrupted, nothing was written", file=sys.stderr)
            return EXIT_INTERRUPTED
    rows = summarise_turns(runs)
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = TurnsOrigin(date, shlex.join(["meridian", *sys.argv[1:]]), cost, grid)
    title = f"s-turns, simulated, {grid.conversations} conversations, cost {cost.name}"
    console.print(f"{title}, seeds {parsed.seeds}", *turns_tables(rows), TABLE_NOTE, sep="\n")
    for path in write_turns_report(parsed.out, rows, runs, origin):
        console.print(str(path), highlight=False)
    return 0


def _grid(parsed: argparse.Namespace) -> "Grid":
    from meridian_patch.bench.simulated.conversation_arms import DEFAULT_ARMS, turns_arm
    from meridian_patch.bench.simulated.conversation_grid import Grid
    from meridian_patch.bench.simulated.conversations import History
    from meridian_patch.bench.simulated.cost import DEFAULT_COST

    def chosen(value: str | None, otherwise: str, in_grid: str) -> list[str]:
        return (value or (in_grid if parsed.grid else otherwise)).split(",")

    known = [history.value for history in History]
    histories = chosen(parsed.history, "stripped", GRID_HISTORIES)
    for name in histories:
        if name not in known:
            raise BenchError(f"--history: unknown mode {name!r}; known: {', '.join(known)}")
    arms = parsed.arms.split(",") if parsed.arms else list(DEFAULT_ARMS)
    for name in arms:
        turns_arm(name, History.STRIPPED)
    return Grid(
        histories=[History(name) for name in histories],
        pools=_each("--pool", chosen(parsed.pool, "100000", GRID_POOLS), read_whole),
        rates=_each("--rate", chosen(parsed.rate, "0.3", GRID_RATES), read_positive),
        seeds=read_seeds(parsed.seeds),
        arms=arms,
        conversations=read_whole("--conversations", parsed.conversations),
        cost=parsed.cost or DEFAULT_COST,
        think_factor=read_positive("--think-factor", parsed.think_factor),
    )


def _each(option: str, texts: Sequence[str], read: Callable[[str, str], Value]) -> list[Value]:
    return list(dict.fromkeys(read(option, text) for text in texts))
