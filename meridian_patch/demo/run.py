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

from meridian_patch import envs
from meridian_patch.bench.interrupts import end_like_ctrl_c
from meridian_patch.bench.options import read_positive, read_whole
from meridian_patch.bench.served.arm_options import read_arms
from meridian_patch.bench.served.arms import ARM_ENVIRONMENTS
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
ARMS = ",".join(ARM_ENVIRONMENTS)
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
    seeds = range(FIRST_SEED, FIRST_SEED + read_whole("--seeds", args.seeds))
    rate = None if args.rate is None else read_positive("--rate", args.rate)
    mix = Mix(requests=read_whole("--requests", args.requests), rate_per_s=rate or 1.0)
    arms = read_arms(args.arms, [], envs.environment())
    settings = tiny_settings(find_model(args.model), read_whole("--blocks", args.blocks))
    console, load = Console(), Load()
    why = ""
    if rate is None and args.trace is None:
        check_ports(args.port, len(arms))
        capacity = measure_capacity(settings, load, mix, args.out, console)
        mix = replace(mix, rate_per_s=round(CAPACITY_SHARE * capacity, 2))
        why = f" Stock completes {capacity:.2f} per second here when all come at once and fit."
    traces, workload = plan_traces(args.trace, mix, list(seeds))
    comparison = Comparison(
        arms=arms,
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
    share = f"{CAPACITY_SHARE:.0%}".replace("%", " %%")
    by_default = f"mean arrivals per second (default: {share} of what stock completes here)"
    parser.add_argument("--seeds", default="1", help="traces per arm (default: 1)")
    parser.add_argument("--requests", default="160", help="per trace (default: 160)")
    parser.add_argument("--rate", help=by_default)
    parser.add_argument("--blocks", default="96", help="KV pool of each server (default: 96)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the report")
    parser.add_argument("--model", type=Path, help="model directory (default: the packaged one)")
    parser.add_argument("--arms", default=ARMS, help=f"comma list (default: {ARMS})")
    parser.add_argument("--trace", type=Path, help="JSON lines to play in place of drawn problems")
    parser.add_argument("--port", type=int, default=0, help="of the servers; 0: any free one")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
