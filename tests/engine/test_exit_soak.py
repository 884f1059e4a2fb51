"""Thousands of requests on a live engine, many aborted: early exit keeps nothing of them."""

import random

import pytest
from engine_plans import PATIENT, SMALL_POOL
from run_engine import PATCHED, Job, run_job
from workloads import ask, engine_arguments

from meridian_patch.demo.problems import make_problems

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

REQUESTS = 5000
PROBLEMS = make_problems(50, seed=8, steps=2)
THINK_END_ID = 257
# Probes come early and often, nearly anything is taken for convergence, and the cap is low.
EAGER = {
    "EXIT__MODE": "enforce",
    "EXIT__MIN_THINK_TOKENS": "8",
    "EXIT__MAX_THINK_TOKENS": "20",
    "EXIT__GRACE_TOKENS": "4",
    "EXIT__EAT_WARMUP_PROBES": "2",
    "EXIT__EAT_DELTA": "1.0",
    "EXIT__EAT_MAX_ENTROPY_NATS": "null",
    "EXIT__PROBE_MIN_GAP_TOKENS": "3",
    "EXIT__PROBE_MAX_GAP_TOKENS": "5",
    "EXIT__PROBE_EVERY_STEPS": "1",
}
ENV = PATCHED | PATIENT | {f"MERIDIAN_PATCH_SET_{name}": value for name, value in EAGER.items()}
PRESSED = {
    "num_gpu_blocks_override": SMALL_POOL,
    "max_model_len": 1024,
    "max_num_batched_tokens": 128,
    "async_scheduling": True,
}
# What some requests ask for by themselves.
WISHES = [
    *[None] * 4,
    {"meridian_exit": "observe"},
    {"meridian_exit": "off"},
    {"meridian_eat_delta": 1e-12, "meridian_rpdi_lambda": 1.5},
]


def traffic():
    """Requests, and the aborts of two in five of them, at any moment of their lives."""
    rng = random.Random(7)
    requests, aborts = [], []
    for number in range(REQUESTS):
        at_step = number * 3 // 2
        wish = rng.choice(WISHES)
        requests.append(
            ask(
                f"r{number}",
                rng.choice(PROBLEMS),
                at_step=at_step,
                # Some are cut off, in thought or behind it.
                max_tokens=rng.choice([12, 30, 60]),
                temperature=1.0,
                n=rng.choice([1] * 9 + [2]),
                **({"extra_args": wish} if wish else {}),
            )
        )
        if rng.random() < 0.4:
            leaves = at_step + rng.randrange(60)
            aborts.append({"do": "abort", "names": [f"r{number}"], "at_step": leaves})
    return {"name": "soak", "requests": requests, "events": aborts}


@pytest.fixture(scope="module")
def soak(demo_model, tmp_path_factory):
    stage = {
        "name": "pressed",
        "engine": engine_arguments(demo_model, **PRESSED),
        "runs": [traffic()],
    }
    job = Job([stage], env=ENV, allow_async=True)
    result = run_job(job, tmp_path_factory.mktemp("soak"))
    return result["stages"]["pressed"]["runs"]["soak"]


def test_nothing_is_left(soak):
    """No request, block, phase, watch, close, probe or outcome; and no step ran as stock."""
    left = {name: soak[name] for name in soak if name.endswith("_left")}
    assert len(left) == 7
    assert set(left.values()) == {0}
    assert soak["kv_faults"] == []
    assert not [name for name in soak["counted"] if name.startswith("fallback")]


def test_the_traffic_is_worth_the_name(soak):
    """Aborts met requests that were there, and everything happened that may leave something."""
    ended = [output for output in soak["outputs"].values() if output["finished"]]
    assert 0.5 * REQUESTS < len(ended) < 0.9 * REQUESTS
    counted = soak["counted"]
    assert counted["probe:measured"] > 1000
    assert min(counted[f"exit:{reason}"] for reason in ("eat", "hard_cap", "natural")) > 50
    assert soak["probed_preemptions"] > 5


def test_no_thought_is_closed_twice(soak):
    """At most one boundary in each output."""
    samples = [s for output in soak["outputs"].values() for s in output["samples"]]
    assert max(sample["ids"].count(THINK_END_ID) for sample in samples) == 1
