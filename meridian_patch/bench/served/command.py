"""``meridian bench serve``: real stock and patched servers on the same traces, in turn."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meridian_patch import envs
from meridian_patch.bench.interrupts import end_like_ctrl_c
from meridian_patch.bench.options import read_positive, read_seeds, read_whole
from meridian_patch.errors import BenchError

if TYPE_CHECKING:
    from meridian_patch.bench.served.run import Comparison

FIRST_SEED = 11
DEFAULT_PAIRS = "5"
EXIT_INTERRUPTED = 130
_HIGHEST_PORT = 65535


def add_serve(benches: Any) -> None:
    """Add ``serve`` to the benches of the ``meridian`` command."""
    serve = benches.add_parser(
        "serve",
        help="stock and patched vLLM servers on the same traces, in turn",
        description="Starts a real vLLM server per arm, plays the same traces on all of them in "
        "turn (order ABBA, one under load at a time), and compares what streaming clients saw. "
        "Every figure is a value per arm and a ratio to stock, with a bootstrap interval over "
        "pairs. All servers are up at once: on one accelerator, give each its share of the memory "
        "with --serve-args.",
    )
    serve.add_argument("--model", help="directory, or owner/name (default: the tiny reasoner)")
    serve.add_argument(
        "--arms", default="stock,latency", help="stock, stock-again, patched, or policy profiles"
    )
    serve.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="one more arm with settings of its own, such as calm:policy.max_preemptions=5",
    )
    serve.add_argument(
        "--trace", type=Path, help="JSON lines that every pair plays, in place of drawn problems"
    )
    serve.add_argument("--requests", default="160", help="per drawn trace (default: 160)")
    serve.add_argument("--rate", default="8", help="mean arrivals per second (default: 8)")
    serve.add_argument("--pairs", help=f"runs of every arm (default: {DEFAULT_PAIRS})")
    serve.add_argument(
        "--seeds", help=f"one drawn trace per pair (default: {FIRST_SEED} and what follows)"
    )
    serve.add_argument(
        "--restart",
        action="store_true",
        help="new servers for every pair, another arm's first: servers of the same settings differ "
        "for as long as they live",
    )
    serve.add_argument("--clients", default="2", help="client processes (default: 2)")
    serve.add_argument(
        "--request-limit", default="180", help="seconds after which a request counts as failed"
    )
    serve.add_argument(
        "--end-marker",
        default="</think>",
        help="text that ends thinking (default: </think>); empty for a model that does not think",
    )
    serve.add_argument(
        "--blocks", help="KV pool of each server (tiny reasoner: 96; others: vLLM's choice)"
    )
    serve.add_argument(
        "--serve-args", default="", metavar="OPTIONS", help="vLLM's options, for every arm alike"
    )
    serve.add_argument(
        "--port", default="0", help="of the first server, others follow; 0: any free ones"
    )
    serve.add_argument("--out", type=Path, default=Path("out/bench/serve"), help="folder")
    serve.set_defaults(run=run_serve)


def run_serve(parsed: argparse.Namespace) -> int:
    """Run the comparison; 1 when an arm or a request failed, 130 on Ctrl-C.

    Raises:
        BenchError: a wrong argument.
    """
    from rich.console import Console

    from meridian_patch.bench.served.run import run_comparison

    end_like_ctrl_c()
    try:
        return run_comparison(_comparison(parsed), Console())
    except KeyboardInterrupt:
        print("meridian: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _comparison(parsed: argparse.Namespace) -> "Comparison":
    from meridian_patch.bench.served.arm_options import read_arms
    from meridian_patch.bench.served.load import Load
    from meridian_patch.bench.served.plan import any_settings, find_model_or_name, plan_traces
    from meridian_patch.bench.served.run import Comparison
    from meridian_patch.bench.served.workload import Mix

    arms = read_arms(parsed.arms, parsed.arm, envs.environment())
    blocks = read_whole("--blocks", parsed.blocks) if parsed.blocks is not None else None
    model = find_model_or_name(parsed.model)
    settings = any_settings(model, blocks, _serve_args(parsed.serve_args))
    mix = Mix(
        requests=read_whole("--requests", parsed.requests),
        rate_per_s=read_positive("--rate", parsed.rate),
    )
    traces, workload = plan_traces(parsed.trace, mix, _seeds(parsed))
    return Comparison(
        arms=arms,
        settings=settings,
        traces=traces,
        workload=workload,
        load=Load(
            processes=read_whole("--clients", parsed.clients),
            request_limit_s=read_positive("--request-limit", parsed.request_limit),
            end_marker=parsed.end_marker,
        ),
        port=_port(parsed.port, len(arms)),
        folder=parsed.out,
        data_name="results.json",
        command=shlex.join(["meridian", *sys.argv[1:]]),
        restarts=parsed.restart,
    )


def _seeds(parsed: argparse.Namespace) -> list[int]:
    """One number per pair; with a trace file they only count the pairs."""
    pairs = read_whole("--pairs", parsed.pairs or DEFAULT_PAIRS)
    if parsed.trace is not None:
        if parsed.seeds is not None:
            raise BenchError("--seeds draws traces and --trace gives one; leave one of them out")
        return list(range(1, pairs + 1))
    if parsed.seeds is None:
        return list(range(FIRST_SEED, FIRST_SEED + pairs))
    seeds = read_seeds(parsed.seeds)
    if parsed.pairs is not None and len(seeds) != pairs:
        raise BenchError(
            f"--pairs is {pairs} and --seeds is {parsed.seeds!r}, which are {len(seeds)}; expected "
            "one seed per pair, so leave one of the options out"
        )
    return seeds


def _serve_args(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BenchError(f"--serve-args is {text!r}: {error}; quote it as in a shell") from None


def _port(text: str, arms: int) -> int:
    last = _HIGHEST_PORT - arms + 1
    if not text.isdecimal() or int(text) > last:
        raise BenchError(f"--port is {text!r}, expected 0 to {last}: each arm takes the next one")
    return int(text)
