"""Replays a long prompt that comes alone beside requests that answer, on stock and on ours.

    python -P scripts/lab/lone_prompt.py [--readers 1,8] [--cost h200-8b-served] [--tokens 32768]

Prints when the answer to each of three such prompts begins, 12 s apart, and how many times as late
as on stock: the first meets an engine that has computed no prompt beside an answer.
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.simulated.arms import named_arm
from meridian_patch.bench.simulated.run import Offer, ReplayJob, run_job

POOL_TOKENS = 412_000
ARRIVALS_S = (8.0, 20.0, 32.0)
READER = {"prompt_tokens": 200, "think_tokens": 20, "answer_tokens": 6000}


def main() -> None:
    """Play both arms for each number of readers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", default="1,8")
    parser.add_argument("--cost", default="h200-8b-served")
    parser.add_argument("--tokens", type=int, default=32_768)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    for readers in map(int, options.readers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "lone.jsonl"
            trace.write_text("".join(lines(readers, options.tokens)))
            stock, ours = (begins_s(trace, arm, options.cost) for arm in (STOCK, "latency"))
        times = [
            f"{own:.2f} s, {own / theirs:.1f} x" for own, theirs in zip(ours, stock, strict=True)
        ]
        print(f"{options.cost}, {readers} readers: stock {stock[0]:.2f} s; ours {'; '.join(times)}")


def lines(readers: int, tokens: int) -> list[str]:
    """A trace: requests that answer all the time, and the long prompts."""
    asked = [{"id": f"a{n}", "arrival_s": 0.01 * n, **READER} for n in range(readers)]
    few = {"think_tokens": 4, "answer_tokens": 4}
    for number, arrival_s in enumerate(ARRIVALS_S):
        asked.append({"id": f"p{number}", "arrival_s": arrival_s, "prompt_tokens": tokens, **few})
    return [json.dumps(each) + "\n" for each in asked]


def begins_s(trace: Path, arm: str, cost: str) -> list[float]:
    """Seconds from the arrival of each long prompt to its first answer token."""
    # By name, readers first.
    job = ReplayJob(Offer("lone", trace=trace), 1, named_arm(arm), None, POOL_TOKENS, cost)
    return [float(each) for each in run_job(job).requests.ttfat_s[-len(ARRIVALS_S) :]]


if __name__ == "__main__":
    main()
