"""For which waiting requests room is made, on vLLM's real scheduler with a full KV pool."""

import random
from types import SimpleNamespace

import pytest
from full_pool import (
    BLOCKS,
    filled_driver,
    job,
    newcomer,
    num_preempted_for_room,
    share_time_alone,
)
from scheduler_driver import (
    BLOCK_SIZE,
    Job,
    make_prompt,
)
from stub_connector import StubConnector
from tier_driver import SYNC_AND_ASYNC, driver_for, preempt, step_until
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.engine.scheduler import displacing
from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.levels import Levels


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    share_time_alone(monkeypatch)


def test_blocks_that_a_running_request_holds_are_not_needed(demo_model):
    """The newcomer shares nine blocks with a thinker: it comes in, and no request makes room."""
    driver = filled_driver(demo_model, prompt=320)
    shared = driver.scheduler.requests["long"].prompt_token_ids[:-1]
    tokens = (*shared, *make_prompt(random.Random(9), 65, thinks=True, shared=9))
    driver.add(Job("new", tokens, 2, 3))
    [new] = driver.scheduler.waiting
    driver.step()
    assert new.status == RequestStatus.RUNNING
    assert not num_preempted_for_room(driver)
    driver.drain()


def set_grammar(driver, request):
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=None)


def set_adapter(driver, request):
    driver.scheduler.lora_config = SimpleNamespace(max_loras=1)
    driver.scheduler.requests["long"].lora_request = LoRARequest("one", 1, "one")
    request.lora_request = LoRARequest("two", 2, "two")


def set_loading(driver, request):
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS


def set_stale(driver, request):
    request.num_stale_output_tokens = 1


def set_unchunked(driver, request):
    driver.scheduler.scheduler_config = SimpleNamespace(
        **{**vars(driver.scheduler.scheduler_config), "enable_chunked_prefill": False}
    )


BLOCKED = [set_grammar, set_adapter, set_loading, set_stale, set_unchunked]


@SYNC_AND_ASYNC
@pytest.mark.parametrize("block", BLOCKED)
def test_no_request_makes_room_for_one_that_lacks_something_else(demo_model, is_async, block):
    """It would not be admitted with all blocks of the pool free."""
    driver = filled_driver(demo_model, is_async=is_async)
    driver.add(newcomer(BLOCKS - 22))
    new = driver.scheduler.requests["new"]
    block(driver, new)
    for _ in range(50):
        driver.step()
    assert new.status != RequestStatus.RUNNING
    assert not num_preempted_for_room(driver)


@pytest.mark.parametrize("block", [set_grammar, set_adapter, set_loading, set_stale])
def test_room_is_made_for_the_first_that_upstream_does_not_skip(demo_model, block):
    """One that is skipped keeps those behind it from nothing.

    A thinker with whose adapter a slot would come free stays: the one that lacks it stands before.
    """
    driver = filled_driver(demo_model)
    driver.add(newcomer(BLOCKS - 22))
    block(driver, driver.scheduler.requests["new"])
    driver.add(newcomer(BLOCKS - 22, "next", 53))
    while not driver.deliveries["next"]:
        driver.step()
    assert num_preempted_for_room(driver) == 1
    assert {"long", "other"} <= set(driver.scheduler.requests)


def test_no_request_makes_room_where_its_adapter_lets_a_longer_one_come_first(demo_model):
    """With its adapter gone the longer one would be next, and lack blocks all the same."""
    driver = filled_driver(demo_model)
    driver.scheduler.kv_cache_manager.block_pool.get_new_blocks(4)
    driver.add(newcomer(BLOCKS - 4))
    set_adapter(driver, driver.scheduler.requests["new"])
    driver.add(newcomer(BLOCKS - 26, "next", 53))
    driver.scheduler.requests["other"].priority = -1
    for _ in range(50):
        driver.step()
    assert not num_preempted_for_room(driver)


@SYNC_AND_ASYNC
@pytest.mark.parametrize("paused", [0, 1])
def test_a_newcomer_that_lacks_a_seat_takes_that_of_a_thinker(demo_model, is_async, paused):
    """Also where a paused session holds one; the thinker comes back when a seat is free."""
    driver = filled_driver(demo_model, is_async=is_async)
    scheduler = driver.scheduler
    scheduler.max_num_active_reqs = 2 + paused
    scheduler.num_waiting_for_streaming_input = paused
    driver.add(newcomer(2))
    while not driver.deliveries["new"]:
        driver.step()
    assert num_preempted_for_room(driver) == 1
    assert len(scheduler.requests) == 3
    while len(scheduler.requests) > 2:
        driver.step()
    driver.step()
    assert len(scheduler.running) == 2


@pytest.mark.parametrize("block", [set_grammar, set_adapter, set_loading, set_stale])
def test_a_seat_is_taken_for_the_first_that_upstream_does_not_skip(demo_model, block):
    """At the limit of running requests vLLM looks at none that waits."""
    driver = filled_driver(demo_model)
    driver.scheduler.max_num_active_reqs = 2
    driver.add(newcomer(2))
    block(driver, driver.scheduler.requests["new"])
    for _ in range(20):
        driver.step()
    assert not num_preempted_for_room(driver)
    driver.add(newcomer(2, "next", 53))
    while not driver.deliveries["next"]:
        driver.step()
    assert num_preempted_for_room(driver) == 1


@SYNC_AND_ASYNC
def test_no_request_that_came_later_and_stands_before_has_room_taken_from_it(demo_model, is_async):
    """vLLM is asked for that one first; it fits, and no request makes room for it."""
    driver = filled_driver(demo_model, is_async=is_async)
    scheduler = driver.scheduler
    driver.add(newcomer(BLOCKS - 22))
    refusals = scheduler.policy_parts.refusals
    while refusals.last is not scheduler.requests["new"]:
        driver.step()
    pool = scheduler.kv_cache_manager.block_pool
    driver.add(newcomer(1, "small", 53), extra_args={"meridian_priority": -1})
    assert scheduler.waiting[0] is scheduler.requests["small"]
    assert pool.get_num_free_blocks() > 4
    driver.step()
    assert scheduler.requests["small"].status == RequestStatus.RUNNING
    assert not num_preempted_for_room(driver)
    while not driver.deliveries["new"]:
        driver.step()


@SYNC_AND_ASYNC
def test_no_request_makes_room_for_one_of_its_own_level(demo_model, is_async):
    """A newcomer waits while all that run have thought as little."""
    driver = filled_driver(demo_model, is_async=is_async)
    driver.scheduler.policy_parts.displacing._service._levels = Levels(1000, 0.0)
    driver.add(newcomer(BLOCKS - 22))
    for _ in range(50):
        driver.step()
    assert not num_preempted_for_room(driver)


@SYNC_AND_ASYNC
def test_no_request_makes_room_for_one_whose_encoder_output_is_in_transit(demo_model, is_async):
    """vLLM asks for no blocks before it is there."""
    driver = filled_driver(demo_model, is_async=is_async)
    driver.scheduler._ec_transfer_pending = lambda request, _: request.request_id == "new"
    driver.add(newcomer(BLOCKS - 22))
    for _ in range(50):
        driver.step()
    assert not num_preempted_for_room(driver)
    assert not driver.deliveries["new"]
    del driver.scheduler._ec_transfer_pending
    driver.drain()
    assert driver.deliveries["new"]


@SYNC_AND_ASYNC
def test_room_is_made_a_few_times_for_a_newcomer_that_is_not_admitted(
    demo_model, is_async, monkeypatch
):
    """Where less comes free than was expected, that costs few preemptions."""
    monkeypatch.setattr(displacing, "freed_blocks", lambda *_: BLOCKS)
    driver = filled_driver(demo_model, is_async=is_async)
    driver.scheduler.kv_cache_manager.block_pool.get_new_blocks(10)
    driver.add(newcomer(BLOCKS - 10))
    for _ in range(200):
        driver.step()
    assert 1 <= num_preempted_for_room(driver) <= 3
    assert not driver.deliveries["new"]


@SYNC_AND_ASYNC
def test_no_request_makes_room_for_one_that_a_connector_knows_nothing_of_yet(demo_model, is_async):
    """vLLM skips it until then, and the displaced one would come back in its place."""
    driver = filled_driver(demo_model, is_async=is_async)
    driver.scheduler.connector = connector = StubConnector(undecided_times=5)
    driver.add(newcomer(BLOCKS - 22))
    new = driver.scheduler.requests["new"]
    while not num_preempted_for_room(driver):
        driver.step()
    # With a connector the room is used in the next step.
    driver.step()
    assert new.status == RequestStatus.RUNNING
    # The sixth time it was refused for the lack of blocks.
    assert connector.asked["new"] == (8 if is_async else 7)
    assert num_preempted_for_room(driver) == 1
    driver.drain()
    assert len(driver.deliveries["new"]) == 7
    assert driver.scheduler.policy_parts.refusals.last is None


class Loading(StubConnector):
    """A KV connector that loads most of one prompt, and never ends."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        is_there = request.request_id == "new"
        return 16 * BLOCK_SIZE * is_there, is_there

    def get_loaded_kv_cache_group_ids(self, request):
        return (0,)


@pytest.mark.parametrize("reserved", [0, 30])
def test_room_for_a_load_leaves_what_prompts_under_way_will_take(demo_model, reserved):
    """vLLM admits a request that loads only beside what these still need."""
    driver = filled_driver(demo_model)
    driver.scheduler.connector = Loading()
    driver.scheduler._inflight_prefill_reserved_blocks = lambda: reserved
    driver.add(newcomer(BLOCKS - 22))
    for _ in range(20):
        if not num_preempted_for_room(driver):
            driver.step()
    driver.step()
    is_loading = driver.scheduler.requests["new"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert is_loading is (reserved == 0)
    assert num_preempted_for_room(driver) == is_loading


@pytest.mark.parametrize("length", range(289, 294))
def test_room_that_is_free_a_step_late_suffices_then(demo_model, length):
    """Until a step in flight has ended, running requests take blocks, and the newcomer waits.

    Room is made for a newcomer that needs every block that is free then, or it is not made.
    """
    driver = filled_driver(demo_model, is_async=True, frees_late=True)
    step_until(driver, "long", Phase.THINK, length)
    manager = driver.scheduler.kv_cache_manager
    own = len(manager.get_blocks("long").blocks[0])
    free = manager.block_pool.get_num_free_blocks()
    driver.add(newcomer(free + own))
    new = driver.scheduler.requests["new"]
    while not num_preempted_for_room(driver):
        driver.step()
    has_come_in = new.status == RequestStatus.RUNNING
    for _ in range(2):
        driver.step()
        has_come_in |= new.status == RequestStatus.RUNNING
    assert has_come_in


@pytest.mark.parametrize("freed", [0, 100])
def test_one_that_was_refused_and_fits_now_displaces_no_request(demo_model, monkeypatch, freed):
    """A newcomer that fits in the next step comes in then, whatever is taken in later steps."""
    driver = filled_driver(demo_model, blocks=140)
    scheduler = driver.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 8)
    driver.add(newcomer(12))
    refusals = scheduler.policy_parts.refusals
    while not refusals.last:
        driver.step()
    monkeypatch.setattr(displacing, "taken_blocks", lambda *_: 1)
    pool.free_blocks(taken[:freed])
    driver.step()
    assert scheduler.requests["new"].status == RequestStatus.RUNNING
    assert num_preempted_for_room(driver) == (freed == 0)


def test_no_request_makes_room_where_that_does_not_suffice(demo_model):
    """All thinkers together hold too little: they go on, and the newcomer waits as in stock."""
    driver = filled_driver(demo_model)
    scheduler = driver.scheduler
    # A third that answers holds what the newcomer would need.
    scheduler.kv_cache_manager.block_pool.get_new_blocks(10)
    driver.add(newcomer(BLOCKS - 10))
    for _ in range(50):
        driver.step()
    assert not num_preempted_for_room(driver)


@SYNC_AND_ASYNC
def test_several_make_room_where_one_does_not_suffice(demo_model, is_async):
    """They go in one step, and the newcomer comes in in that step."""
    driver = filled_driver(demo_model, is_async=is_async)
    driver.add(newcomer(BLOCKS - 8))
    while not num_preempted_for_room(driver):
        driver.step()
    assert num_preempted_for_room(driver) == 2
    assert driver.scheduler.requests["new"].status == RequestStatus.RUNNING
    driver.drain()
    assert [len(driver.deliveries[name]) for name in ("long", "other", "new")] == [707, 507, 7]
    assert find_faults(driver.scheduler.kv_cache_manager.block_pool) == []


@SYNC_AND_ASYNC
def test_room_is_made_beside_what_running_prompts_take(demo_model, is_async):
    """Running requests get their blocks first: what they leave must suffice for the newcomer."""
    driver = filled_driver(
        demo_model, is_async=is_async, blocks=60, long_prefill_token_threshold=64
    )
    scheduler = driver.scheduler
    for number in range(3):
        driver.add(job(f"prompt{number}", 60 + number, prompt=1000, think=2, answer=3))
    # Admitted although they do not fit whole.
    scheduler.scheduler_reserve_full_isl = False
    driver.step()
    scheduler.scheduler_reserve_full_isl = True
    assert not num_preempted_for_room(driver)
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 8)
    # Each prompt takes two blocks or more: of eight blocks no more than two are left.
    held = len(scheduler.kv_cache_manager.get_blocks("long").blocks[0])
    driver.add(newcomer(held + 4))
    new = scheduler.requests["new"]
    for _ in range(4):
        driver.step()
        is_in = new.status == RequestStatus.RUNNING
        assert is_in == bool(num_preempted_for_room(driver))


@SYNC_AND_ASYNC
def test_no_request_makes_room_for_one_that_waits_behind_an_answer(demo_model, is_async):
    """The answer goes first and lacks more blocks than a displaced thinker would free."""
    driver = filled_driver(demo_model, is_async=is_async, blocks=80)
    scheduler = driver.scheduler
    driver.add(job("reads", 70, prompt=1000, think=2, answer=300))
    step_until(driver, "reads", Phase.ANSWER, 5)
    driver.add(newcomer(6, "aged"))
    driver.step()
    for name in ("aged", "reads"):
        preempt(driver, name)
    before, now_s = num_preempted_for_room(driver), scheduler.clock()
    scheduler.clock = lambda: now_s + 60
    pool = scheduler.kv_cache_manager.block_pool
    # Of another engine: a thinker's blocks suffice for the aged request, not for the answer.
    pool.get_new_blocks(pool.get_num_free_blocks() - 4)
    for _ in range(5):
        driver.step()
    assert [request.request_id for request in scheduler.waiting] == ["reads", "aged"]
    assert num_preempted_for_room(driver) == before


def test_no_request_makes_room_where_the_cut_leaves_no_tokens(demo_model, monkeypatch):
    """Prompts under way take up what a cut leaves of a step: no other request would come in."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__STEP_CUT", "true")
    driver = filled_driver(demo_model, blocks=100)
    scheduler = driver.scheduler
    driver.add(job("reads", 70, think=2, answer=300))
    step_until(driver, "reads", Phase.ANSWER, 5)
    driver.add(job("prompt", 71, prompt=500, think=2, answer=3))
    prompt = scheduler.requests["prompt"]
    monkeypatch.setattr(scheduler.policy_parts.cut._cut, "token_budget", lambda *_: 20)
    driver.step()
    assert not num_preempted_for_room(driver)
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 22)
    driver.add(newcomer(26))
    new = scheduler.requests["new"]
    while not num_preempted_for_room(driver):
        driver.step()
    # With a connector the room is used in the next step.
    driver.step()
    assert new.status == RequestStatus.RUNNING
    assert not prompt.is_prefill_chunk


def test_the_policy_keeps_no_request_that_is_gone(demo_model):
    """One that is aborted in the middle of its prompt is forgotten at once, not in a later plan."""
    driver = driver_for(demo_model, max_num_batched_tokens=64)
    driver.add(job("gone", 80, prompt=400))
    driver.step()
    prefilling = driver.scheduler.request_states.prefilling
    assert len(prefilling) == 1
    driver.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    assert not prefilling


@pytest.mark.parametrize("adapters", [0, 1])
def test_room_is_made_beside_an_adapter_and_a_connector(demo_model, adapters):
    """Few blocks are free, but enough for the next step of all that run."""
    driver = filled_driver(demo_model)
    scheduler = driver.scheduler
    scheduler.connector = StubConnector(undecided_times=5)
    scheduler.lora_config = SimpleNamespace(max_loras=4)
    if adapters:
        scheduler.requests["other"].lora_request = LoRARequest("one", 1, "one")
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    driver.add(newcomer(8))
    new, steps = scheduler.requests["new"], 0
    while new.status != RequestStatus.RUNNING:
        driver.step()
        steps += 1
        assert steps < 10
