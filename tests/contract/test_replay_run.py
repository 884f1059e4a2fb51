"""Replays of trace files on vLLM's real scheduler and KV manager."""

import dataclasses

import numpy as np
import pytest

from meridian_patch.bench.simulated.arms import named_arm, own_arm
from meridian_patch.bench.simulated.grid import Plan, RunKey, SweepPoint, find_points, plan_jobs
from meridian_patch.bench.simulated.metrics import AloneTimes
from meridian_patch.bench.simulated.run import Offer, ReplayJob, run_job
from meridian_patch.bench.simulated.trace import TraceRequest, write_trace
from meridian_patch.errors import BenchError
from meridian_patch.replay.cost import DEFAULT_COST, load_cost
from meridian_patch.replay.scheduler import BLOCK_SIZE, MAX_BATCHED_TOKENS

POOL = 8 * 1024


@pytest.fixture
def offer(tmp_path):
    """Short requests, all at once on a small pool: many are preempted."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 400, (24, 3)).tolist()
    trace = [TraceRequest(f"{n:02}", 0.05 * n, *row) for n, row in enumerate(lengths)]
    return offer_of(trace, tmp_path)


def offer_of(trace, folder):
    path = folder / "trace.jsonl"
    write_trace(path, trace)
    return Offer("trace.jsonl", len(trace), path)


def job(offer, arm="stock", pool=POOL, **changes):
    made = ReplayJob(offer, 3, named_arm(arm), None, pool, DEFAULT_COST)
    return dataclasses.replace(made, **changes)


class Inline:
    """Runs jobs in this process."""

    def run(self, jobs):
        return ((key, run_job(job)) for key, job in jobs.items())


@pytest.mark.parametrize(
    ("prompt", "think", "answer"),
    [(100, 50, 20), (2 * MAX_BATCHED_TOKENS + 100, 1, 1), (MAX_BATCHED_TOKENS, 0, 30), (5, 300, 2)],
)
def test_alone_is_what_a_lonely_request_gets(prompt, think, answer, tmp_path):
    """The closed form gives the TTFAT and the end of a real replay of one request."""
    offer = offer_of([TraceRequest("only", 1.5, prompt, think, answer)], tmp_path)
    run = run_job(job(offer, pool=None))
    assert run.requests.slowdown[0] == pytest.approx(1.0, rel=1e-9)
    known = int(run.figures["prompt_tokens"])
    last = int(run.figures["output_tokens"]) - 1
    alone = AloneTimes(load_cost(DEFAULT_COST).step_seconds, MAX_BATCHED_TOKENS)
    assert run.requests.e2e_s[0] == pytest.approx(alone.seconds(known, last), rel=1e-9)
    assert run.figures["first_wait_max_s"] == 0.0
    assert run.figures["longest_pause_s"] < 0.5
    assert run.figures["preemptions"] == 0


def test_phases_add_up_under_preemption(offer):
    """Preemptions and recomputed tokens by phase sum up to the totals of a run that has them."""
    figures = run_job(job(offer)).figures
    for name in ("preemptions", "recomputed_tokens"):
        by_phase = [figures[f"{name}_{phase}"] for phase in ("prefill", "think", "answer")]
        assert sum(by_phase) == figures[name] > 0
    assert figures["preempted_answers"] <= figures["preemptions_answer"]
    assert figures["longest_pause_s"] > 0
    assert figures["first_wait_max_s"] > 0


def test_noop_gives_the_figures_of_stock(offer):
    stock, noop = run_job(job(offer)), run_job(job(offer, "noop"))
    assert stock.figures == noop.figures
    assert stock.requests.ttfat_s.tolist() == noop.requests.ttfat_s.tolist()
    assert stock.counters == {}


def test_a_replay_is_repeatable_and_pairs_by_request(offer):
    first, second = run_job(job(offer, "latency")), run_job(job(offer, "latency"))
    assert first.figures == second.figures
    assert (
        first.requests.ids == run_job(job(offer)).requests.ids == tuple(sorted(first.requests.ids))
    )


def test_policies_change_what_happens(offer):
    """An arm's settings reach the scheduler, those of an ad-hoc arm too."""
    stock, latency = run_job(job(offer)), run_job(job(offer, "latency"))
    mine = own_arm("mine:policy.name=latency,kv.tiers=false")
    own = run_job(dataclasses.replace(job(offer), arm=mine))
    assert latency.figures["ttfat_mean_s"] != stock.figures["ttfat_mean_s"]
    assert own.counters


def test_timeline_counts_every_request(offer):
    timeline = run_job(job(offer, has_timeline=True)).timeline
    total = sum(timeline.running.values()) + timeline.waiting
    assert 0 < total.max() <= 24
    assert 0 < timeline.kv_usage.max() <= 1
    assert run_job(job(offer)).timeline is None


def test_a_pool_for_one_request_only_is_enough_and_less_is_refused(offer):
    with pytest.raises(
        BenchError, match=r"KV pool is 160 tokens, expected at least (\d+)"
    ) as caught:
        run_job(job(offer, pool=160))
    needed = int(str(caught.value).split("at least ")[1].split(":")[0])
    assert needed % BLOCK_SIZE == 0
    run = run_job(job(offer, pool=needed))
    assert len(run.requests.ids) == 24


def test_caps_and_loads_are_measured_against_saturated_stock(offer):
    """KV cap 1 is what saturated stock holds; rho 1 offers what it puts out."""
    plan = Plan(
        [offer], [named_arm("stock")], [3], DEFAULT_COST, kv_caps=[1.0, 0.5], rhos=[1.0, 2.0]
    )
    found = []
    points = find_points(plan, Inline(), found.append)
    ample, whole, half = found
    assert ample.pool_tokens is None
    assert whole.pool_tokens == pytest.approx(ample.kv_p99_tokens, abs=BLOCK_SIZE)
    assert half.pool_tokens == pytest.approx(whole.pool_tokens / 2, abs=BLOCK_SIZE)
    assert len(found) == plan.num_saturations == 3
    assert [point.rho for point in points] == [1.0, 2.0, 1.0, 2.0]
    assert points[1].rate_per_s == pytest.approx(2 * whole.requests_per_s)
    jobs = plan_jobs(plan, points[1:2])
    last = max(request.arrival_s for request in next(iter(jobs.values())).trace())
    assert last == pytest.approx(24 / points[1].rate_per_s)
    assert list(jobs) == [RunKey(points[1], "stock", 3)]


def test_a_seed_whose_longest_request_does_not_fit_is_refused_before_anything_runs(offer):
    plan = Plan([offer], [named_arm("stock")], [3], DEFAULT_COST, pools=[160], rates=[None])
    with pytest.raises(BenchError, match="give a larger --pool or --kv-cap"):
        plan_jobs(plan, [SweepPoint(offer.workload, None, 160, None, None)])
