"""``meridian bench serve``: real stock and patched servers on the same requests, in turn."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from meridian_patch.bench.interrupts import EXIT_INTERRUPTED, end_like_ctrl_c

WORKLOADS = ("problems", "turns", "mixed")
HISTORIES = ("stripped", "kept", "plain")


def add_serve(benches: Any) -> argparse.ArgumentParser:
    """Add ``serve`` to the benches of the ``meridian`` command; its parser."""
    serve: argparse.ArgumentParser = benches.add_parser(
        "serve",
        help="stock and patched vLLM servers on the same requests, in turn",
        description="Starts a real vLLM server per arm, plays the same traces on all of them in "
        "turn (another one first each time, one under load at a time), and compares what streaming "
        "clients saw. Every figure is a value per arm and a ratio to stock, with a bootstrap "
        "interval over pairs. All servers are up at once: on one accelerator, give each its share "
        "of the memory with --serve-args.",
    )
    serve.add_argument("--model", help="directory, or a cached name (default: the tiny reasoner)")
    serve.add_argument(
        "--arms",
        default="stock,latency",
        help="stock, stock-again, ample (stock with 20 times the KV pool, for the upper bound of "
        "prefix hits), patched, or policy profiles",
    )
    serve.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="one more arm with settings of its own, such as calm:policy.level_tokens=1024, or a "
        "configuration file, such as early:config=profile.yaml",
    )
    serve.add_argument(
        "--workload",
        default="problems",
        choices=WORKLOADS,
        help="single problems in bursts, turns of conversations, or half of each",
    )
    serve.add_argument(
        "--trace", type=Path, help="JSON lines that every pair plays, in place of a drawn workload"
    )
    serve.add_argument("--requests", help="per drawn trace (default: 160; turns: 96, mixed: 20)")
    serve.add_argument(
        "--rate",
        help="mean arrivals per second (default: 8; turns: 0.7 conversations, mixed: 2000); auto: "
        "35 %% of what stock completes on this machine",
    )
    serve.add_argument("--pause", help="mean seconds from an answer to the next turn (default: 4)")
    serve.add_argument(
        "--pause-tokens",
        metavar="N",
        help="mean pause as the time that one request alone takes for N tokens, measured when the "
        "first servers are up; in place of --pause, and alike on slow and fast machines",
    )
    serve.add_argument(
        "--history",
        default="stripped",
        choices=HISTORIES,
        help="earlier thoughts in later turns: stripped, kept, or plain: models do not think",
    )
    serve.add_argument("--pairs", help="runs of every arm (default: 5)")
    serve.add_argument(
        "--seeds", help="one drawn trace per pair, such as 11,12 or 11-15 (default: from 11 on)"
    )
    serve.add_argument(
        "--restart",
        action="store_true",
        help="new servers for every pair, another arm's first: servers of the same settings differ "
        "for as long as they live",
    )
    serve.add_argument(
        "--headlines", action="store_true", help="print the most important figures only"
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
        "--blocks",
        help="KV pool of each server (tiny reasoner: 96, turns: 224, mixed: 72; other models: "
        "vLLM's choice)",
    )
    serve.add_argument(
        "--serve-args", default="", metavar="OPTIONS", help="vLLM's options, for every arm alike"
    )
    serve.add_argument(
        "--emulate",
        metavar="DEVICE",
        help="no GPU: steps last as long as those of a device, a cost model such as "
        "h100-32b-dense or a file of one, and the KV pool is the device's unless --blocks is given",
    )
    serve.add_argument(
        "--emulate-tokens",
        default="1",
        metavar="N",
        help="tokens of the device that one token of the model stands for, in time and pool",
    )
    serve.add_argument(
        "--fidelity",
        action="store_true",
        help="with --emulate: replay what each server did with the same cost model, and compare",
    )
    serve.add_argument(
        "--emulate-beside-gpu", action="store_true", help="also where this machine has a GPU"
    )
    serve.add_argument(
        "--port", default="0", help="of the first server, others follow; 0: any free ones"
    )
    serve.add_argument("--out", type=Path, default=Path("out/bench/serve"), help="folder")
    serve.set_defaults(run=run_serve)
    return serve


def run_serve(parsed: argparse.Namespace, command: str | None = None) -> int:
    """Run the comparison; 1 when an arm or a request failed, 130 on Ctrl-C.

    Args:
        parsed: as ``add_serve`` declares.
        command: as typed, where it was another one.

    Raises:
        BenchError: a wrong argument.
    """
    from rich.console import Console

    from meridian_patch.bench.served.plan import plan_comparison
    from meridian_patch.bench.served.run import run_comparison

    console = Console(markup=False, emoji=False)
    command = command or shlex.join(["meridian", *sys.argv[1:]])
    end_like_ctrl_c()
    try:
        return run_comparison(plan_comparison(parsed, command, console), console)
    except KeyboardInterrupt:
        print("meridian: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
