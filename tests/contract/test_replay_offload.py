"""The offload tier of a replay: vLLM's own scheduler and connector, copies of virtual time."""

import random

import pytest

from meridian_patch.replay.cost import DEFAULT_COST, load_cost
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.offload import KV_BYTES_PER_TOKEN
from meridian_patch.replay.player import play
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_template_tokens
from meridian_patch.replay.types import ReplayArm, ReplayRequest

TIGHT, LARGE = 3000, 200_000
FAST, SLOW = 50.0, 0.05
ARMS = [
    pytest.param(is_patched, is_async, id=f"{name}-{'async' if is_async else 'sync'}")
    for name, is_patched in (("stock", False), ("meridian", True))
    for is_async in (True, False)
]


class Given:
    """Arrivals as they are; what finishes brings nothing about."""

    def __init__(self, arrivals):
        self._arrivals = arrivals

    def start(self):
        return self._arrivals

    def follow(self, record):
        return ()


class Watched(ReplayEngine):
    """Remembers vLLM's own requests, and the most that the tier ever held."""

    def __init__(self, arm, pool, **options):
        cost = load_cost(DEFAULT_COST)
        super().__init__(
            arm, pool // BLOCK_SIZE, cost.step_seconds, read_template_tokens(), **options
        )
        self.upstream = {}
        self.most_held_tokens = 0

    def add(self, request, arrival_s):
        super().add(request, arrival_s)
        self.upstream[request.request_id] = self.scheduler.requests[request.request_id]

    def step(self):
        work = super().step()
        if self.scheduler.connector is not None:
            held = self.scheduler.connector.scheduler.manager._policy.chunks
            self.most_held_tokens = max(self.most_held_tokens, len(held) * BLOCK_SIZE)
        return work


def text(rng, tokens):
    return [rng.randrange(read_template_tokens().content_ids) for _ in range(tokens)]


def make(name, prompt, think, answer, rng):
    template = read_template_tokens()
    output = [*text(rng, think), template.think_end, *text(rng, answer), template.turn_end]
    return ReplayRequest(name, [*prompt, template.think_start], output, think + 1)


def arrivals(requests=30, seed=1):
    """Together they want several times the tight pool."""
    rng = random.Random(seed)
    return [
        (
            0.05 * number,
            make(
                f"r{number}",
                text(rng, rng.randrange(20, 150)),
                rng.randrange(50, 500),
                rng.randrange(20, 100),
                rng,
            ),
        )
        for number in range(requests)
    ]


def replay(gb_per_s, *, pool=TIGHT, is_patched=False, is_async=True):
    arm = ReplayArm("arm", is_patched=is_patched, offload_gb_per_s=gb_per_s)
    engine = Watched(arm, pool, is_async=is_async)
    records = play(engine, Given(arrivals()))
    for record in records:
        name = record.request.request_id
        assert list(engine.upstream[name].output_token_ids) == record.request.output
        assert record.finish_reason == "stop"
        assert len(record.token_s) == len(record.request.output)
        assert record.token_s == sorted(record.token_s)
    assert len(records) == len(arrivals())
    assert engine.is_idle
    assert "fallback:exception" not in engine.counters()
    return engine, records


@pytest.mark.parametrize(("is_patched", "is_async"), ARMS)
def test_a_preempted_request_resumes_without_recompute(is_patched, is_async):
    """What is left to compute again is less than one block per preemption."""
    options = {"is_patched": is_patched, "is_async": is_async}
    without, _ = replay(None, **options)
    engine, _ = replay(FAST, **options)
    totals = engine.totals
    assert without.totals.recomputed_tokens > 100 * without.totals.preemptions > 0
    assert without.totals.reloaded_tokens == 0
    assert 0 < totals.recomputed_tokens <= BLOCK_SIZE * totals.preemptions
    assert totals.reloaded_tokens > 100 * totals.preemptions


def test_stores_hold_nothing_up():
    """With room for all, every token of an arm with a tier comes when it comes without."""
    _, without = replay(None, pool=LARGE)
    engine, records = replay(SLOW, pool=LARGE)
    assert [record.token_s for record in records] == [record.token_s for record in without]
    assert engine.totals.reloaded_tokens == 0
    assert engine.most_held_tokens > 0


@pytest.mark.parametrize("gb_per_s", [FAST, SLOW])
@pytest.mark.parametrize("is_async", [True, False])
def test_an_evicted_prefix_is_loaded_at_the_stated_bandwidth(gb_per_s, is_async):
    rng = random.Random(1)
    # The other takes every block of the pool.
    shared, other = text(rng, 330), text(rng, 620)
    pool = 40 * BLOCK_SIZE
    engine = Watched(ReplayArm("arm", offload_gb_per_s=gb_per_s), pool, is_async=is_async)
    records = play(
        engine,
        Given(
            [
                (0.0, make("first", shared, 5, 5, rng)),
                (10.0, make("other", other, 5, 5, rng)),
                (20.0, make("again", shared, 5, 5, rng)),
            ]
        ),
    )
    again = records[-1]
    loaded = 330 // BLOCK_SIZE * BLOCK_SIZE
    assert engine.totals.preemptions == 0
    assert again.hit_tokens == engine.totals.reloaded_tokens == loaded
    seconds = loaded * KV_BYTES_PER_TOKEN / (gb_per_s * 1e9)
    assert again.admitted_s - again.arrival_s == pytest.approx(seconds)


def test_a_replay_with_a_tier_is_repeatable():
    (first, records), (second, others) = replay(FAST), replay(FAST)
    assert first.totals == second.totals
    assert [record.token_s for record in records] == [record.token_s for record in others]
