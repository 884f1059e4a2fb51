"""``meridian bench policy-micro``."""

import argparse
from pathlib import Path
from typing import Any


def add_policy_micro(benches: Any) -> None:
    """Add ``policy-micro`` to the benches."""
    micro = benches.add_parser(
        "policy-micro", help="what the policy costs per step, by running and waiting requests"
    )
    micro.add_argument("--running", default="64,256,1024", help="requests that run")
    micro.add_argument("--waiting", default="0,1000", help="requests that wait behind them")
    micro.add_argument(
        "--deep", default="5000", help="requests that wait behind a full KV pool; 0: leave that out"
    )
    micro.add_argument("--steps", default="400", help="measured steps per arm")
    micro.add_argument("--seed", default="1", help="of the lengths")
    micro.add_argument("--out", type=Path, default=Path("out/bench/policy-micro"), help="folder")
    micro.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from meridian_patch.bench.micro.policy import run_policy_micro

    return run_policy_micro(parsed)
