"""Prompts beside answers where hardly one of their tokens fits in the default target."""

import json
import random

import numpy as np
import pytest

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.simulated.arms import named_arm
from meridian_patch.bench.simulated.run import Offer, ReplayJob, run_job
from meridian_patch.engine.scheduler import step_cut

POOL_TOKENS = 60_000
# A step of 7 ms takes 10 ms more with any prompt, as it is not one captured graph then.
COST = "h200-8b-served"


@pytest.fixture
def busy(tmp_path):
    """Twenty requests per second with short thoughts, and prompts of 1,600 tokens on average."""
    rng, arrival_s, lines = random.Random(11), 0.0, []
    for number in range(80):
        arrival_s += rng.expovariate(20.0)
        row = {
            "id": f"r{number}",
            "arrival_s": arrival_s,
            "prompt_tokens": int(min(rng.lognormvariate(7.4, 0.7), 4000)),
            "think_tokens": rng.randint(10, 40),
            "answer_tokens": rng.randint(60, 120),
        }
        lines.append(json.dumps(row) + "\n")
    path = tmp_path / "busy.jsonl"
    path.write_text("".join(lines))
    return path


def first_answers_s(trace, arm):
    job = ReplayJob(Offer("busy", trace=trace), 1, named_arm(arm), None, POOL_TOKENS, COST)
    return float(np.mean(run_job(job).requests.ttfat_s))


def test_first_answers_come_soon_because_a_step_may_take_40_ms(busy, monkeypatch):
    """On vLLM's scheduler; stock computes them in steps that are twice as long."""
    stock_s, ours_s = first_answers_s(busy, STOCK), first_answers_s(busy, "latency")
    monkeypatch.setattr(step_cut, "UNNOTICED_S", 0.0)
    without_s = first_answers_s(busy, "latency")
    assert ours_s < 1.1 * stock_s
    assert without_s > 1.25 * stock_s
