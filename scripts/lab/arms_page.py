"""Plays published ways to schedule beside ours on vLLM's real scheduler, and writes their page.

    python -P scripts/lab/arms_page.py [--workers 2] [--seeds 401-408] [--requests 700]

Replays are appended to OUT/lines.jsonl as they end; the same command goes on where it was
interrupted, and plays again only what today's code would play otherwise.
"""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arms import campaign, page
from arms.goodput import find_goodputs
from arms.registry import ARMS
from arms.results import Results
from arms.summary import Summary
from arms.tuning import tune

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.options import read_seeds
from meridian_patch.bench.simulated.run import Workers
from meridian_patch.bench.simulated.workloads import find_workload
from meridian_patch.errors import BenchError

_TUNING = f"{campaign.TUNING_SEEDS[0]}-{campaign.TUNING_SEEDS[-1]}"
EVERY = (STOCK, campaign.OURS, *ARMS)


def main() -> int:
    """Play, print progress, write the page; 2 for a wrong option."""
    options = _parser().parse_args()
    try:
        _run(options)
    except BenchError as error:
        print(f"arms_page: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("arms_page: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    arms = list(dict.fromkeys((STOCK, *_names("--arms", options.arms, EVERY))))
    chosen = _names("--goodput", options.goodput, EVERY)
    workloads = options.workloads.split(",")
    for name in workloads:
        find_workload(name)
    try:
        rhos = [float(text) for text in options.rho.split(",")]
    except ValueError:
        raise BenchError(f"--rho: {options.rho!r}, expected numbers such as 0.9,1.1") from None
    pool = campaign.REAL_POOL if options.real_pool else options.pool
    logging.disable(logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "lines.jsonl", lambda text: print(text, flush=True))
    with Workers(options.workers) as workers:
        points = campaign.find_rates(workloads, pool, rhos, workers, options.out)
        if options.tune:
            tuned = read_seeds(options.tune)
            if not set(tuned) <= set(campaign.TUNING_SEEDS):
                raise BenchError(f"--tune: {options.tune}, expected seeds of {_TUNING}")
            tune(results, points, arms, tuned, options.requests, workers)
            return
        seeds = read_seeds(options.seeds)
        if not options.page_only:
            wanted = campaign.keys(points, arms, seeds, options.requests)
            results.complete(wanted, workers)
        goodputs = []
        if chosen:
            goodputs = find_goodputs(
                results,
                points,
                chosen,
                seeds[: options.goodput_seeds],
                options.requests,
                workers,
                options.workers,
            )
    summary = Summary(results.lines, arms, seeds, options.requests)
    text = page.write(options.page, summary, points, goodputs, " ".join(sys.argv[1:]))
    print(text)


def _names(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise BenchError(f"{option}: unknown arm {name!r}; known: {', '.join(known)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--arms", default=",".join(EVERY), help="comma list; stock is always played")
    add("--workloads", default="s-prod,s-mixed")
    add("--rho", default="0.9,1.1", help="offered load over what saturated stock puts out")
    add("--pool", type=int, default=campaign.SHORT_POOL, help="KV pool in tokens")
    add("--real-pool", action="store_true", help=f"a pool of {campaign.REAL_POOL:,} tokens")
    add("--seeds", default="401-408")
    add("--requests", type=int, default=700)
    add("--workers", type=int, default=2)
    add("--goodput", default="", help="arms whose goodput is searched, too")
    add("--goodput-seeds", type=int, default=3)
    add("--tune", metavar="SEEDS", help=f"search settings on seeds of {_TUNING}; writes no page")
    add("--page-only", action="store_true", help="no replays but those of --goodput")
    add("--out", type=Path, default=Path("out/arms"))
    add("--page", type=Path, default=Path("out/arms/arms.md"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
