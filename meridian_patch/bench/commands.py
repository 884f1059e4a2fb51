"""``meridian bench``: comparisons that need no accelerator."""

import argparse
from pathlib import Path
from typing import Any

from meridian_patch.bench.exit.command import add_exit
from meridian_patch.bench.exit_trace import add_exit_trace
from meridian_patch.bench.micro.policy_command import add_policy_micro
from meridian_patch.bench.micro.probe import add_probe_micro
from meridian_patch.bench.options import read_whole
from meridian_patch.bench.served.command import add_serve
from meridian_patch.bench.served.conversation_command import add_served_turns
from meridian_patch.bench.simulated.command import add_replay
from meridian_patch.bench.simulated.fit_command import add_fit_cost
from meridian_patch.bench.simulated.validate_command import add_validate


def add_bench(commands: Any) -> None:
    """Add ``bench`` to the subcommands of the ``meridian`` command."""
    bench = commands.add_parser("bench", help="comparisons with stock vLLM")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    add_serve(benches)
    add_fit_cost(benches)
    add_validate(benches)
    add_served_turns(benches)
    add_replay(benches)
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
