"""``meridian bench``: comparisons that need no accelerator."""

from typing import Any

from meridian_patch.bench.exit.command import add_exit
from meridian_patch.bench.exit_trace import add_exit_trace
from meridian_patch.bench.served.command import add_serve
from meridian_patch.bench.simulated.command import add_replay
from meridian_patch.bench.simulated.fit_command import add_fit_cost


def add_bench(commands: Any) -> None:
    """Add ``bench`` to the subcommands of the ``meridian`` command."""
    bench = commands.add_parser("bench", help="comparisons with stock vLLM")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    add_serve(benches)
    add_fit_cost(benches)
    add_replay(benches)
    add_exit_trace(benches)
    add_exit(benches)
