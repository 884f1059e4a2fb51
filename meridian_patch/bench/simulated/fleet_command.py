"""``meridian bench capacity``: what 1, 8 and 64 GPUs serve, from replays of one engine."""

import argparse
from pathlib import Path
from typing import Any

from meridian_patch.bench.options import read_positive, read_whole
from meridian_patch.bench.simulated.fleet import Parts, best_of, fleet_of, page_of, rates_in
from meridian_patch.config.json_text import parse_json
from meridian_patch.errors import BenchError


def add_capacity(benches: Any) -> None:
    """Add ``capacity`` to the benches of the ``meridian`` command."""
    parser = benches.add_parser(
        "capacity",
        help="what a number of GPUs serves, from replays of one engine",
        description="Reads the results of 'meridian bench sweep --rate R1,R2,... --pool P', takes "
        "the highest rate at which 95 %% of the requests are within the limits of goodput, and "
        "multiplies. Prints Markdown.",
    )
    parser.add_argument("results", type=Path, help="results.json of a replay or a sweep")
    parser.add_argument("--arm", default="latency", help="of the results (%(default)s)")
    parser.add_argument("--gpus", default="1,8,64", help="numbers of GPUs (%(default)s)")
    parser.add_argument("--gpus-per-engine", default="1", help="(%(default)s)")
    parser.add_argument("--kv-bytes-per-token", default="131072", help="of the model (%(default)s)")
    parser.add_argument("--nic-gbit", default="400", help="network of one GPU (%(default)s)")
    parser.add_argument(
        "--router-us",
        default="150",
        help="processor time of the router per token; scripts/marathon measures it (%(default)s)",
    )
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    parts = Parts(
        read_whole("--gpus-per-engine", parsed.gpus_per_engine),
        read_whole("--kv-bytes-per-token", parsed.kv_bytes_per_token),
        read_positive("--nic-gbit", parsed.nic_gbit),
        read_positive("--router-us", parsed.router_us),
    )
    try:
        results = parse_json(parsed.results.read_text(encoding="utf-8"))
        rates = rates_in(results, parsed.arm)
        about = f"simulated, cost model {results['cost_model']['name']}"
        workload = results["workloads"][0]["workload"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise BenchError(
            f"{parsed.results} is no results.json of 'meridian bench sweep': {error}"
        ) from error
    best = best_of(rates)
    numbers = [read_whole("--gpus", text) for text in parsed.gpus.split(",")]
    print(f"{about}, arm {parsed.arm}, {workload}\n")
    print(page_of([fleet_of(gpus, best, parts) for gpus in numbers], rates, best))
    return 0
