"""The demo: stock and patched vLLM in turn, on the same trace, under the same KV pressure.

A preset of ``meridian bench serve``.

``python -P -m meridian_patch.demo.run`` starts real servers on the tiny reasoner, streams a trace
from each, prints one table and writes ``report.html`` and ``report.json``.
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from meridian_patch.bench.interrupts import end_like_ctrl_c
from meridian_patch.bench.served.arms import ARM_ENVIRONMENTS, Arm
from meridian_patch.bench.served.capacity import measure_capacity
from meridian_patch.bench.served.load import Load
from meridian_patch.bench.served.plan import find_model, plan_traces, tiny_settings
from meridian_patch.bench.served.report import DATA_NAME
from meridian_patch.bench.served.run import Comparison, check_ports, run_comparison
from meridian_patch.bench.served.workload import Mix
from meridian_patch.errors import MeridianError

FIRST_SEED = 1
# Share of the rate that stock completes when all requests come at once and fit. Bursts fill the
# small pool.
CAPACITY_SHARE = 0.35
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_MODULE = "meridian_patch.demo.run"


def main(argv: list[str] | None = None) -> None:
    """Run the demo; exits with 1 when an arm failed and 130 on Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    end_like_ctrl_c()
    try:
        sys.exit(_run(_parse(arguments), shlex.join(["python", "-P", "-m", _MODULE, *arguments])))
    except MeridianError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def _run(args: argparse.Namespace, command: str) -> int:
    settings = tiny_settings(find_model(args.model), args.blocks)
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    console, load = Console(), Load()
    mix = Mix(requests=args.requests, rate_per_s=args.rate or 1.0)
    why = ""
    if args.rate is None and args.trace is None:
        check_ports(args.port, len(args.arms))
        capacity = measure_capacity(settings, load, mix, args.out, console)
        mix = replace(mix, rate_per_s=round(CAPACITY_SHARE * capacity, 2))
        why = f" Stock completes {capacity:.2f} per second here when all come at once and fit."
    traces, workload = plan_traces(args.trace, mix, list(seeds))
    comparison = Comparison(
        arms=[Arm(name, ARM_ENVIRONMENTS[name]) for name in args.arms],
        settings=settings,
        traces=traces,
        workload=workload + why,
        load=load,
        port=args.port,
        folder=args.out,
        data_name=DATA_NAME,
        command=command,
        restarts=True,
    )
    return run_comparison(comparison, console)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -P -m {_MODULE}", description=__doc__)
    whole = "a whole number above 0"
    share = f"{CAPACITY_SHARE:.0%}".replace("%", " %%")
    by_default = f"mean arrivals per second (default: {share} of what stock completes here)"
    parser.add_argument("--seeds", type=_count, default=1, help=f"traces per arm, {whole}")
    parser.add_argument("--requests", type=_count, default=160, help=f"per trace, {whole}")
    parser.add_argument("--rate", type=_rate, help=by_default)
    parser.add_argument("--blocks", type=_count, default=96, help="KV pool of each server")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the report")
    parser.add_argument("--model", type=Path, help="model directory (default: the packaged one)")
    parser.add_argument("--arms", type=_arms, default=list(ARM_ENVIRONMENTS), help="comma list")
    parser.add_argument("--trace", type=Path, help="JSON lines to play in place of drawn problems")
    parser.add_argument("--port", type=int, default=0, help="of the servers; 0: any free one")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _arms(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ARM_ENVIRONMENTS:
            known = ", ".join(ARM_ENVIRONMENTS)
            raise argparse.ArgumentTypeError(f"unknown arm {name!r}; known: {known}")
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names an arm twice")
    return names


if __name__ == "__main__":
    main()
