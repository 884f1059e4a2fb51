"""``meridian bench replay`` and ``meridian bench sweep``."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meridian_patch.bench.interrupts import EXIT_FAILED, EXIT_INTERRUPTED, end_like_ctrl_c
from meridian_patch.bench.options import read_positive, read_seeds, read_whole
from meridian_patch.errors import BenchError

if TYPE_CHECKING:
    from meridian_patch.bench.simulated.grid import Plan
    from meridian_patch.bench.simulated.run import Offer

Value = TypeVar("Value")

# Width of tables that go to a file, so that no cell is broken.
_FILE_WIDTH = 180

DEFAULT_ARMS = "stock,noop,latency"
REPLAY_LOAD, SWEEP_LOADS = "0.9", "0.7,0.9,1.1"
REPLAY_CAP, SWEEP_CAPS = "0.25", "1,0.5,0.25"


def add_replay(benches: Any) -> None:
    """Add ``replay`` and ``sweep`` to the benches of the ``meridian`` command."""
    replay = benches.add_parser(
        "replay",
        help="policies on one workload, replayed on vLLM's real scheduler",
        description="Replays a workload or a trace on vLLM's real scheduler and KV cache manager, "
        "without a model and on a virtual clock, and compares policies with stock.",
    )
    _add_options(replay, "out/bench/replay", REPLAY_LOAD, REPLAY_CAP)
    replay.add_argument("--trace", type=Path, help="JSON lines file instead of --workload")
    replay.add_argument(
        "--history", default="stripped", help="earlier thoughts in later prompts of the trace"
    )
    replay.add_argument("--write-trace", type=Path, help="write the first seed's trace to a file")
    replay.set_defaults(run=run_replay, is_sweep=False)
    sweep = benches.add_parser(
        "sweep",
        help="policies over workloads, loads and KV pools, replayed on vLLM's real scheduler",
        description="As replay, over all combinations of --workload, of --rho or --rate, and of "
        "--kv-cap or --pool, which take comma lists; shows goodput over load.",
    )
    _add_options(sweep, "out/bench/sweep", SWEEP_LOADS, SWEEP_CAPS)
    sweep.set_defaults(
        run=run_replay, is_sweep=True, trace=None, history="stripped", write_trace=None
    )


def run_replay(parsed: argparse.Namespace) -> int:
    """Run the comparison and write its results; 1 if a replay failed, 130 on Ctrl-C.

    Raises:
        BenchError: a wrong argument.
    """
    from rich.console import Console

    from meridian_patch.bench.simulated.report import Results
    from meridian_patch.bench.simulated.session import make_folder, play, show
    from meridian_patch.bench.simulated.summary import Limits
    from meridian_patch.replay.cost import load_cost

    plan = read_plan(parsed)
    slowdown = read_positive("--max-slowdown", parsed.max_slowdown)
    itl_ms = read_positive("--max-itl-ms", parsed.max_itl_ms)
    processes = read_whole("--workers", parsed.workers)
    limits = Limits(slowdown, itl_ms / 1000)
    results = Results(plan, load_cost(plan.cost), limits, parsed.is_sweep)
    make_folder(parsed.out)
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    console = Console(width=width, markup=False, emoji=False)
    end_like_ctrl_c()
    play(results, processes, console, parsed.write_trace)
    show(results, parsed.out, console)
    if results.is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if results.failures else 0


def read_plan(parsed: argparse.Namespace) -> "Plan":
    """The plan that the options describe.

    Raises:
        BenchError: an option is wrong, or two options exclude each other.
    """
    from meridian_patch.bench.simulated.arms import choose_arms
    from meridian_patch.bench.simulated.grid import Plan
    from meridian_patch.replay.cost import DEFAULT_COST

    seeds = read_seeds(parsed.seeds)
    offers = _offers(parsed)
    if offers[0].trace and len(seeds) > 1:
        raise BenchError(
            f"--seeds is {parsed.seeds!r}, expected one: a trace file is one draw, and other seeds "
            "would repeat it"
        )
    _at_most_one(parsed, "rho", "rate")
    _at_most_one(parsed, "kv_cap", "pool")
    pools = _each("--pool", parsed.pool, read_whole)
    rates: list[float | None] = [*_each("--rate", parsed.rate, read_positive)]
    rhos = _each("--rho", parsed.rho, read_positive)
    if not rates and not rhos:
        # A trace has its own arrival times.
        rates, rhos = ([None], []) if offers[0].trace else ([], _default(parsed.default_rho))
    caps = _each("--kv-cap", parsed.kv_cap, read_positive)
    if not parsed.is_sweep and max(map(len, (offers, pools or caps, rates or rhos)), default=1) > 1:
        raise BenchError(
            "replay takes one workload, one load and one pool; lists are for 'meridian bench sweep'"
        )
    offload = parsed.offload_gb_per_s
    return Plan(
        offers=offers,
        arms=choose_arms(parsed.arms, parsed.arm),
        seeds=seeds,
        cost=parsed.cost or DEFAULT_COST,
        pools=pools,
        kv_caps=caps if pools or caps else _default(parsed.default_cap),
        rates=rates,
        rhos=rhos,
        offload_gb_per_s=read_positive("--offload-gb-per-s", offload) if offload else None,
    )


def _add_options(parser: argparse.ArgumentParser, folder: str, rho: str, cap: str) -> None:
    add = parser.add_argument
    add("--workload", help="such as s-prod (default) or s-turns; docs/workloads.md has all")
    add("--requests", default="300", help="per replay")
    add("--rho", help=f"offered load over what saturated stock can do (default: {rho})")
    add("--rate", help="instead of --rho: requests per second")
    add("--kv-cap", help=f"KV pool over what saturated stock would use (default: {cap})")
    add("--pool", help="instead of --kv-cap: KV pool in tokens")
    add("--arms", default=DEFAULT_ARMS, help=f"policies; stock is always run ({DEFAULT_ARMS})")
    add(
        "--arm",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="an arm of your own, by configuration keys; can be repeated",
    )
    add("--seeds", default="1", help="for example 1,2 or 11-20")
    add("--cost", default=None, help="cost model: a packaged name, or a YAML file")
    add("--offload-gb-per-s", help="every arm reloads preempted KV at this bandwidth")
    add("--max-slowdown", default="10", help="TTFAT slowdown that goodput allows")
    add("--max-itl-ms", default="100", help="answer ITL p99 that goodput allows")
    add("--workers", default="2", help="processes")
    add("--out", type=Path, default=Path(folder), help=f"folder (default: {folder})")
    parser.set_defaults(default_rho=rho, default_cap=cap)


def _offers(parsed: argparse.Namespace) -> "list[Offer]":
    from meridian_patch.bench.simulated.run import Offer
    from meridian_patch.bench.simulated.trace import History, read_trace
    from meridian_patch.bench.simulated.workloads import find_workload

    requests = read_whole("--requests", parsed.requests)
    if parsed.trace is not None:
        if parsed.workload:
            raise BenchError("--workload and --trace are both given; give one of them")
        known = [history.value for history in History]
        if parsed.history not in known:
            raise BenchError(
                f"--history: unknown mode {parsed.history!r}; known: {', '.join(known)}"
            )
        trace = read_trace(parsed.trace)
        return [Offer(parsed.trace.name, len(trace), parsed.trace, History(parsed.history))]
    names = dict.fromkeys((parsed.workload or "s-prod").split(","))
    for name in names:
        find_workload(name)
    return [Offer(name, requests) for name in names]


def _at_most_one(parsed: argparse.Namespace, first: str, second: str) -> None:
    if getattr(parsed, first) and getattr(parsed, second):
        options = (f"--{name.replace('_', '-')}" for name in (first, second))
        raise BenchError(f"{' and '.join(options)} are both given; give one of them")


def _default(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _each(option: str, text: str | None, read: Callable[[str, str], Value]) -> list[Value]:
    return list(dict.fromkeys(read(option, part) for part in text.split(","))) if text else []
