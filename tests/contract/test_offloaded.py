"""Requests that make room beside a KV tier of vLLM, on the real scheduler and connectors."""

import random

import pytest
from simple_offload import use_simple_offload
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from meridian_patch.replay.cost import DEFAULT_COST, load_cost
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_template_tokens
from meridian_patch.replay.types import ReplayArm, ReplayRequest

SET = "MERIDIAN_PATCH_SET_POLICY__"
# All are let in at once, and no request is displaced.
ALONE = {f"{SET}TIME_SHARING": "false"}
POOL_BLOCKS = 50
TIER_BLOCKS = 400
BIG, SMALL = 500, 90
MODES = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
LAZY = pytest.mark.parametrize("is_lazy", [True, False], ids=["lazy", "eager"])


@pytest.fixture
def make(monkeypatch, patience):
    """Builds an engine with the connector."""

    def build(settings=None, *, is_async=True, is_lazy=False, tier=TIER_BLOCKS, gb_per_s=25.0):
        use_simple_offload(monkeypatch, tier, lazy_offload=is_lazy)
        return Engine({**ALONE, **(settings or {})}, gb_per_s, is_async=is_async)

    return build


class Engine(ReplayEngine):
    """Remembers vLLM's own requests."""

    def __init__(self, settings, gb_per_s, *, is_async):
        arm = ReplayArm("arm", True, settings, offload_gb_per_s=gb_per_s)
        step_seconds = load_cost(DEFAULT_COST).step_seconds
        super().__init__(arm, POOL_BLOCKS, step_seconds, read_template_tokens(), is_async=is_async)
        self.requests = {}

    def think(self, name, prompt, think, answer=2):
        template = read_template_tokens()
        # No two prompts begin alike.
        text = [(len(self.requests) + n) % template.content_ids for n in range(prompt - 1)]
        output = [*([7] * think), template.think_end, *([8] * answer), template.turn_end]
        self.add(ReplayRequest(name, [*text, template.think_start], output, think + 1), self.now)
        self.requests[name] = self._live[name][0]

    def until(self, is_reached):
        for _ in range(2000):
            if is_reached():
                return
            self.step()
        raise AssertionError("not reached in 2000 steps")

    def finish(self):
        self.until(lambda: self.is_idle)
        assert {record.finish_reason for record in self.take_finished()} <= {"stop"}
        assert "fallback:exception" not in self.counters()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == POOL_BLOCKS

    def preempted_first(self):
        """Step until a request is; then to the end."""
        self.until(lambda: any(one.num_preemptions for one in self.requests.values()))
        first = [name for name, one in self.requests.items() if one.num_preemptions]
        self.finish()
        return first

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self._live[name]


def small_and_big(engine):
    """The big one came last and has computed more."""
    engine.think("small", SMALL, 250)
    engine.think("big", BIG, 250)
    return engine


@MODES
@LAZY
def test_nothing_is_lost_so_the_last_is_preempted(make, is_async, is_lazy):
    engine = small_and_big(make(is_async=is_async, is_lazy=is_lazy))
    assert engine.preempted_first() == ["big"]
    # What was not stored when it was preempted.
    assert engine.totals.recomputed_tokens <= 3 * BLOCK_SIZE
    assert engine.totals.reloaded_tokens > 0 or is_lazy


SHARING = {f"{SET}TIME_SHARING": "true", f"{SET}LEVEL_TOKENS": "100"}


@MODES
def test_a_newcomer_takes_the_place_of_a_thinker(make, is_async):
    """Also while a step in flight writes its blocks, as in every asynchronous step."""
    engine = make(SHARING, is_async=is_async)
    engine.think("one", BIG, 250)
    one = engine.requests["one"]
    engine.until(lambda: len(one.output_token_ids) > 150)
    engine.think("two", 300, 5)
    two = engine.requests["two"]
    engine.until(two.is_finished)
    assert one.num_preemptions == 1
    assert not one.is_finished()
    engine.finish()
    assert engine.totals.recomputed_tokens <= 3 * BLOCK_SIZE


def test_nothing_is_admitted_in_the_step_of_a_displacement(make):
    """A victim might be, and a connector does not expect it to load in that step."""
    engine = make(SHARING, is_async=False)
    engine.think("one", 350, 250)
    engine.think("small", 40, 250)
    one, small = engine.requests["one"], engine.requests["small"]
    engine.until(lambda: len(one.output_token_ids) > 150)
    engine.think("two", 300, 5)
    engine.until(lambda: one.num_preemptions + small.num_preemptions)
    assert len(engine.scheduler.running) == 1
    engine.until(lambda: len(engine.scheduler.running) == 2)
    assert engine.requests["two"] in engine.scheduler.running
    engine.finish()


@MODES
def test_a_request_aborted_while_it_loads_is_forgotten(make, is_async):
    engine = small_and_big(make(is_async=is_async, gb_per_s=0.5))
    loading = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.until(lambda: any(one.status == loading for one in engine.requests.values()))
    (name,) = [name for name, one in engine.requests.items() if one.status == loading]
    engine.abort(name)
    engine.finish()


@MODES
def test_any_order_of_aborts_leaves_nothing_behind(make, is_async):
    """Eager alone: into a small tier vLLM copies lazily for ever, and an engine is never idle."""
    for seed in range(2):
        rng = random.Random(seed)
        engine = make(
            {f"{SET}TIME_SHARING": "true", f"{SET}LEVEL_TOKENS": "50"},
            is_async=is_async,
            tier=rng.choice((20, 60, TIER_BLOCKS)),
            gb_per_s=rng.choice((0.2, 25.0)),
        )
        for number in range(12):
            engine.think(f"r{number}", rng.randrange(20, 300), rng.randrange(5, 200))
        for _ in range(2000):
            if engine._live and rng.random() < 0.02:
                engine.abort(rng.choice(sorted(engine._live)))
            if not engine.is_idle:
                engine.step()
        engine.finish()
        manager = engine.scheduler.connector.scheduler_manager
        assert manager.cpu_block_pool.get_num_free_blocks() == manager.num_cpu_blocks - 1


def stored_in(engine):
    """Indices of the first request's blocks that the tier holds."""
    pool = engine.scheduler.connector.scheduler_manager.cpu_block_pool
    hashes = [
        make_block_hash_with_group_id(each, 0) for each in engine.requests["one"].block_hashes
    ]
    table = pool.cached_block_hash_to_block
    return [index for index, key in enumerate(hashes) if table.get_one_block(key)]


STRIP = {"MERIDIAN_PATCH_SET_KV__HISTORY": "strip"}
NO_TIERS = {**STRIP, "MERIDIAN_PATCH_SET_KV__TIERS": "false"}
# The last block of the prompt holds the start of the thought.
PROMPT, PROMPT_BLOCKS = 100, 99 // BLOCK_SIZE


@MODES
def test_a_finished_thought_is_given_up(make, is_async):
    """Its blocks are the first that the tier uses again; the prompt stays."""
    engine = make(STRIP, is_async=is_async)
    engine.think("one", PROMPT, 200, 20)
    one = engine.requests["one"]
    engine.until(lambda: len(one.output_token_ids) > 150)
    assert len(stored_in(engine)) > PROMPT_BLOCKS + 5
    engine.finish()
    engine.think("two", 40, 40)
    engine.finish()
    stored = stored_in(engine)
    assert stored[:PROMPT_BLOCKS] == list(range(PROMPT_BLOCKS))
    # A copy that was under way when the request ended.
    assert len(stored) <= PROMPT_BLOCKS + 1


@MODES
def test_without_kv_tiers_it_stays(make, is_async):
    engine = make(NO_TIERS, is_async=is_async)
    engine.think("one", PROMPT, 200, 20)
    engine.finish()
    assert len(stored_in(engine)) > PROMPT_BLOCKS + 10


@pytest.mark.parametrize(("settings", "is_stored"), [(STRIP, False), (NO_TIERS, True)])
@MODES
def test_lazily_a_finished_thought_is_never_stored(make, settings, is_stored, is_async):
    engine = make(settings, is_async=is_async, is_lazy=True)
    engine.think("one", PROMPT, 200, 20)
    engine.until(lambda: not engine._live)
    # The free blocks are walked over while another request runs.
    engine.think("two", 40, 100)
    engine.finish()
    stored = stored_in(engine)
    assert set(stored) >= set(range(PROMPT_BLOCKS))
    assert bool(set(stored) - set(range(PROMPT_BLOCKS))) is is_stored


@MODES
def test_a_thought_that_is_preempted_is_not_given_up(make, is_async):
    """The loads of a preempted request find all that it had computed."""
    engine = small_and_big(make(STRIP, is_async=is_async))
    engine.preempted_first()
    assert engine.totals.recomputed_tokens <= 3 * BLOCK_SIZE


def test_a_block_that_another_request_loads_is_not_given_up(make):
    engine = make(STRIP)
    engine.think("one", PROMPT, 200, 20)
    one = engine.requests["one"]
    engine.until(lambda: len(one.output_token_ids) > 150)
    manager = engine.scheduler.connector.scheduler_manager
    pool = manager.cpu_block_pool
    index = PROMPT_BLOCKS + 3
    key = make_block_hash_with_group_id(one.block_hashes[index], 0)
    block = pool.cached_block_hash_to_block.get_one_block(key)
    pool.touch([block])
    engine.finish()
    assert index in stored_in(engine)
    assert len(stored_in(engine)) <= PROMPT_BLOCKS + 2
    pool.free_blocks([block])


@pytest.mark.parametrize(("is_tiered", "is_stored"), [("true", False), ("false", True)])
def test_a_finished_thought_is_not_stored_late(is_tiered, is_stored):
    """A tier that had no room while the request ran is not offered the thought at its end."""
    settings = {
        **ALONE,
        "MERIDIAN_PATCH_SET_KV__HISTORY": "strip",
        "MERIDIAN_PATCH_SET_KV__TIERS": is_tiered,
    }
    # Of OffloadingConnector.
    engine = Engine(settings, 25.0, is_async=True)
    engine.think("one", 100, 200)
    side = engine.scheduler.connector.connector_scheduler
    state, store, offered = side._req_status["one"], side.manager.prepare_store, []

    def prepare_store(keys, context):
        if not engine.requests["one"].is_finished():
            return None
        offered.extend(keys)
        return store(keys, context)

    side.manager.prepare_store = prepare_store
    while not engine.is_idle:
        engine.step()
    keys = state.group_states[0].offload_keys
    kept = 99 // BLOCK_SIZE
    assert set(offered) >= set(keys[:kept])
    assert bool(set(offered) & set(keys[kept:])) is is_stored
