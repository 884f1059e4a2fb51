"""Compares data-parallel ranks with and without the rule ``balance``, replayed in lock step.

    python -P scripts/bench_ranks.py [--seeds 11-13] [--ranks 4] [--requests 80] [--rate 2]

No model is run: vLLM's real schedulers and its front's real choice of a rank, on one virtual clock
and the cost model of a mixture of experts. Each seed is played three times: off twice, and with the
rule.
"""

import argparse
import logging
from dataclasses import replace
from typing import Any

import numpy as np

from meridian_patch.bench.options import read_seeds
from meridian_patch.bench.simulated.arms import arm_settings, own_arm
from meridian_patch.bench.simulated.metrics import AloneTimes, answer_gaps, per_request
from meridian_patch.bench.simulated.source import TraceSource
from meridian_patch.bench.simulated.trace import History
from meridian_patch.bench.simulated.workloads import draw_trace
from meridian_patch.replay.cost import load_cost
from meridian_patch.replay.ranks import LockStepRanks, play_ranks
from meridian_patch.replay.scheduler import BLOCK_SIZE, MAX_BATCHED_TOKENS, read_template_tokens

COST, WORKLOAD = "h100-30b-a3b-moe", "s-mixed"
COLUMNS = (
    "seed", "arm", "idle-rank steps", "steps", "tokens/s", "worst queue", "worst answer gap (ms)",
    "answer gap p99 (ms)", "TTFAT mean (s)", "TTFAT p95 (s)",
)  # fmt: skip


def main() -> None:
    """Play all seeds and print a row for each play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="11-13")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--pool", type=int, default=200_000, help="KV tokens of each rank")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for seed in read_seeds(options.seeds):
        for name in ("off", "off again", "on"):
            print(f"| {' | '.join([str(seed), name, *play(name, seed, options)])} |", flush=True)


def play(name: str, seed: int, options: Any) -> list[str]:
    """The figures of one play, as text in the order of the columns after ``arm``."""
    is_on = str(name.startswith("on")).lower()
    arm = own_arm(f"arm:policy.name=latency,policy.balance={is_on}")
    arm = replace(arm, settings=arm_settings(arm, History.STRIPPED))
    cost, template = load_cost(COST), read_template_tokens()
    blocks = options.pool // BLOCK_SIZE
    ranks = LockStepRanks(options.ranks, arm, blocks, cost.step_seconds, template)
    trace = draw_trace(WORKLOAD, options.requests, options.rate, seed)
    records = play_ranks(ranks, TraceSource(trace, template, History.STRIPPED, seed))
    requests = per_request(records, AloneTimes(cost.step_seconds, MAX_BATCHED_TOKENS))
    gaps_ms = answer_gaps(records) * 1000
    tokens = sum(len(record.token_s) for record in records)
    return [
        str(ranks.idle_rank_steps),
        str(ranks.steps),
        f"{tokens / ranks.now:.0f}",
        str(ranks.worst_queue),
        f"{gaps_ms.max():.0f}",
        f"{np.quantile(gaps_ms, 0.99):.1f}",
        f"{requests.ttfat_s.mean():.1f}",
        f"{np.quantile(requests.ttfat_s, 0.95):.1f}",
    ]


if __name__ == "__main__":
    main()
