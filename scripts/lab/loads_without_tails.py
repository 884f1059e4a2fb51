"""Writes traces whose lengths have no heavy tail, for ``meridian bench replay --trace``."""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from meridian_patch.bench.simulated.workloads import draw_trace

Draw = Callable[[random.Random], float]
SHORT_SHARE = 0.6


class Load(NamedTuple):
    """Requests per second, and how lengths are drawn, in tokens."""

    rate_per_s: float
    prompt: Draw
    think: Draw


def _short_prompt(rng: random.Random) -> float:
    return rng.lognormvariate(5.5, 1)


def _two_kinds(rng: random.Random) -> float:
    return rng.uniform(100, 500) if rng.random() < SHORT_SHARE else rng.uniform(6000, 9000)


# The loads of the GPU suite's served part: requests per second, how many, and the most tokens that
# a prompt, a thought and an answer have there.
SERVED = {"quiet": (6.83, 205), "busy": (13.67, 547)}
MOST = (3000, 500, 200)
LOADS = {
    "documents": Load(
        4.0,
        lambda rng: rng.choice((300, 2000, 4000, 6000, 8000)),
        lambda rng: rng.uniform(100, 500),
    ),
    "even": Load(2.6, _short_prompt, lambda rng: rng.uniform(1500, 2500)),
    "two-kinds": Load(1.7, _short_prompt, _two_kinds),
}


def draw(load: Load, requests: int, seed: int) -> list[dict[str, object]]:
    """Rows of a trace file; answers have 50 to 300 tokens."""
    rng, arrival_s, rows = random.Random(seed), 0.0, []
    for number in range(requests):
        arrival_s += rng.expovariate(load.rate_per_s)
        prompt, think, answer = load.prompt(rng), load.think(rng), rng.uniform(50, 300)
        rows.append(
            {
                "id": f"{seed}-{number}",
                "arrival_s": round(arrival_s, 4),
                "prompt_tokens": int(prompt),
                "think_tokens": int(think),
                "answer_tokens": int(answer),
            }
        )
    return rows


def served(name: str, seed: int) -> list[dict[str, object]]:
    """Rows of a load that was served on a GPU; its own seeds are 31 and 32."""
    rate, requests = SERVED[name]
    rows = []
    for each in draw_trace("s-prod", requests, rate, seed):
        lengths = (each.prompt_tokens, max(each.think_tokens, 1), each.answer_tokens)
        prompt, think, answer = map(min, lengths, MOST)
        rows.append(
            {
                "id": each.id,
                "arrival_s": each.arrival_s,
                "prompt_tokens": prompt,
                "think_tokens": think,
                "answer_tokens": answer,
            }
        )
    return rows


def main() -> None:
    """Write each load for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300, help="default: 300")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--out", type=Path, default=Path("out/loads"), help="default: out/loads")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        rows = {name: draw(load, args.requests, seed) for name, load in LOADS.items()}
        rows |= {name: served(name, seed) for name in SERVED}
        for name, each in rows.items():
            path = args.out / f"{name}-{seed}.jsonl"
            path.write_text("".join(f"{json.dumps(row)}\n" for row in each))
            print(path)


if __name__ == "__main__":
    main()
