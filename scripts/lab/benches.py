"""Benches for those who work on this repository; ``meridian bench`` has those for users.

    python -P scripts/lab/benches.py policy-micro [--running 64,256] [--waiting 0,1000]

``kv-micro``, ``policy-micro``, ``probe-micro`` and ``telemetry-micro`` time single operations on
the CPU, without a model; ``validate`` plays the same traces on a real engine and in replay.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from validation.command import add_validate

from meridian_patch.bench.interrupts import run_program
from meridian_patch.bench.options import read_whole


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a bench; exits with 1 on an error of ours and 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="benches.py", description=(__doc__ or "").split("\n")[0])
    benches = parser.add_subparsers(required=True, metavar="BENCH")
    _add_micro(benches)
    add_validate(benches)
    parsed = parser.parse_args(argv)
    run_program("benches", lambda: int(parsed.run(parsed)))


def _add_micro(benches: Any) -> None:
    kv = benches.add_parser(
        "kv-micro", help="what the KV tiers cost per operation, on 100 000 blocks"
    )
    kv.add_argument("--rounds", default="15", help="interleaved rounds, ours and stock")
    kv.add_argument(
        "--in-order", action="store_true", help="requests finish in the order they came in"
    )
    kv.set_defaults(run=_kv)
    policy = benches.add_parser(
        "policy-micro", help="what the policy costs per step, by running and waiting requests"
    )
    policy.add_argument("--running", default="64,256,1024", help="requests that run")
    policy.add_argument("--waiting", default="0,1000", help="requests that wait behind them")
    policy.add_argument(
        "--deep", default="5000", help="requests that wait behind a full KV pool; 0: leave that out"
    )
    policy.add_argument("--steps", default="400", help="measured steps per arm")
    policy.add_argument("--seed", default="1", help="of the lengths")
    policy.set_defaults(run=_policy)
    probe = benches.add_parser("probe-micro", help="what a probe costs the CPU, by its context")
    probe.add_argument("--context", default="1000,8000,32000", help="tokens of the probed thoughts")
    probe.add_argument("--rounds", default="100", help="probes per context")
    probe.set_defaults(run=_probe)
    telemetry = benches.add_parser(
        "telemetry-micro",
        help="what metrics, usage and times cost per step, switched on and off within one engine",
    )
    telemetry.add_argument("--running", default="64,256", help="requests that run")
    telemetry.add_argument("--pairs", default="400", help="pairs of steps, on and off")
    telemetry.add_argument("--seed", default="1", help="of the lengths")
    telemetry.set_defaults(run=_telemetry)
    commands = {
        "kv-micro": kv,
        "policy-micro": policy,
        "probe-micro": probe,
        "telemetry-micro": telemetry,
    }
    for name, command in commands.items():
        command.add_argument("--out", type=Path, default=Path("out/bench", name), help="folder")


def _kv(parsed: argparse.Namespace) -> int:
    from micro.kv import run_kv_micro

    rounds = read_whole("--rounds", parsed.rounds)
    return run_kv_micro(rounds, parsed.out, in_order=parsed.in_order)


def _policy(parsed: argparse.Namespace) -> int:
    from micro.policy import run_policy_micro

    running = [read_whole("--running", text) for text in parsed.running.split(",")]
    waiting = [_read_count("--waiting", text) for text in parsed.waiting.split(",")]
    steps, seed = read_whole("--steps", parsed.steps), read_whole("--seed", parsed.seed)
    deep = _read_count("--deep", parsed.deep)
    return run_policy_micro(running, waiting, deep, steps, seed, parsed.out)


def _probe(parsed: argparse.Namespace) -> int:
    from micro.probe import run_probe_micro

    contexts = [read_whole("--context", text) for text in parsed.context.split(",")]
    rounds = read_whole("--rounds", parsed.rounds)
    return run_probe_micro(contexts, rounds, parsed.out)


def _telemetry(parsed: argparse.Namespace) -> int:
    from micro.telemetry import run_telemetry_micro

    running = [read_whole("--running", text) for text in parsed.running.split(",")]
    pairs, seed = read_whole("--pairs", parsed.pairs), read_whole("--seed", parsed.seed)
    return run_telemetry_micro(running, pairs, seed, parsed.out)


def _read_count(option: str, text: str) -> int:
    """A whole number, also 0."""
    return 0 if text == "0" else read_whole(option, text)


if __name__ == "__main__":
    main()
