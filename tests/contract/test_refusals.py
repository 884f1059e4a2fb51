"""What vLLM refuses a waiting request, and what a preemption frees, on its real KV manager."""

import random

import pytest
from scheduler_driver import (
    BLOCK_SIZE,
    Job,
    full_attention,
    make_prompt,
    sliding_window,
)
from tier_driver import SYNC_AND_ASYNC, driver_for, let_eagle_draft, preempt, step_until
from vllm.v1.request import RequestStatus

from meridian_patch.engine.scheduler.admission_checks import (
    freed_blocks,
    taken_blocks,
    whole_blocks,
)
from meridian_patch.engine.scheduler.refusals import Refusals
from meridian_patch.phase.tracker import Phase


def job(name, seed, *, prompt=60, think=50, answer=20, **more):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer, **more)


def refused(driver, *, shared=0, tail=200, free=1):
    """A newcomer with so many tokens of a running request's prompt, after vLLM refused it."""
    scheduler = driver.scheduler
    refusals = scheduler.policy_parts.refusals
    driver.add(job("runs", 1, prompt=330, think=400))
    driver.step()
    head = scheduler.requests["runs"].prompt_token_ids[:shared]
    tokens = (*head, *make_prompt(random.Random(9), tail, thinks=True, shared=9))
    driver.add(Job("new", tokens, 2, 3))
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - free)
    driver.step()
    assert refusals.last is scheduler.requests["new"]
    return refusals, taken


@pytest.mark.parametrize("ahead", [0, BLOCK_SIZE])
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("watermark", [0, 3])
@pytest.mark.parametrize("shared", [0, 319])
@pytest.mark.parametrize("spare", [-1, 0])
def test_what_a_request_lacks_is_what_upstream_says(
    demo_model, shared, spare, watermark, eagle, ahead
):
    """With one block less than it is said to lack it is not admitted, with as many it is.

    Upstream asks for blocks of drafts only once the prompt alone has room.
    """
    driver = driver_for(demo_model, blocks=60, max_num_batched_tokens=2000)
    driver.scheduler.num_lookahead_tokens = ahead
    manager = driver.scheduler.kv_cache_manager
    manager.watermark_blocks = watermark
    if eagle:
        let_eagle_draft(driver)
    refusals, taken = refused(driver, shared=shared)
    new = driver.scheduler.requests["new"]
    missing, hits = refusals.num_missing(new), (9 - eagle) * bool(shared)
    assert missing == -(-(new.num_prompt_tokens + ahead) // BLOCK_SIZE) - hits + watermark - 1
    assert list(map(len, refusals.prefix_of(new))) == [hits]
    manager.block_pool.free_blocks(taken[: missing + spare])
    driver.scheduler.schedule()
    is_in = spare == 0
    assert (new.status == RequestStatus.RUNNING) is is_in
    assert (refusals.last is None) is is_in
    assert refusals.num_missing(new) == (0 if is_in else 1)
    assert refusals.num_missing(driver.scheduler.requests["runs"]) == 0


@pytest.mark.parametrize("drops", [True, False], ids=["drops", "flagged alone"])
def test_a_shared_prefix_ends_before_the_block_that_eagle_drops(demo_model, drops):
    """From vLLM 0.33 on a cache group may be flagged as a drafter's and drop nothing."""
    driver = driver_for(demo_model, blocks=60, max_num_batched_tokens=2000)
    let_eagle_draft(driver)
    manager = driver.scheduler.kv_cache_manager
    if not drops:
        manager.coordinator.drop_eagle_group_ids = set()
    driver.add(job("runs", 1, prompt=330, think=400))
    driver.step()
    head = driver.scheduler.requests["runs"].prompt_token_ids[:319]
    driver.add(Job("new", (*head, *make_prompt(random.Random(9), 80, thinks=True, shared=9)), 2, 3))
    whole = whole_blocks(driver.scheduler, driver.scheduler.requests["new"])
    assert whole == -(-399 // BLOCK_SIZE) - (9 - drops) + manager.watermark_blocks


def test_a_refusal_is_forgotten_with_its_request(demo_model):
    driver = driver_for(demo_model, blocks=60, max_num_batched_tokens=2000)
    refusals, _ = refused(driver)
    new = driver.scheduler.requests["new"]
    refusals.forget(driver.scheduler.requests["runs"])
    assert refusals.last is new
    refusals.forget(new)
    assert refusals.last is None
    assert not refusals.prefix_of(new)


def test_a_running_request_is_not_refused(demo_model):
    """For want of blocks it is preempted, or waits for those that come free."""
    driver = driver_for(demo_model, blocks=60, max_num_batched_tokens=2000)
    refusals, taken = refused(driver)
    driver.abort("new")
    refusals.forget(refusals.last)
    runs, pool = driver.scheduler.requests["runs"], driver.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks())
    while runs.status == RequestStatus.RUNNING:
        driver.step()
    pool.free_blocks(taken)
    driver.drain()
    assert refusals.last is None


@pytest.mark.parametrize("name", ["runs", "later"])
@pytest.mark.parametrize("ahead", [1, 40, 70])
def test_a_preemption_frees_what_no_other_request_holds(demo_model, name, ahead):
    """The one that runs ahead let go of blocks at the start of a window that both have."""
    groups = (full_attention(), sliding_window(4 * BLOCK_SIZE))
    driver = driver_for(demo_model, blocks=120, groups=groups, max_num_batched_tokens=2000)
    scheduler = driver.scheduler
    driver.add(job("runs", 1, prompt=330, think=400))
    driver.add(job("third", 3, prompt=60, think=400))
    step_until(driver, "runs", Phase.THINK, ahead)
    shared = scheduler.requests["runs"].prompt_token_ids[:319]
    tokens = (*shared, *make_prompt(random.Random(9), 80, thinks=True, shared=9))
    driver.add(Job("later", tokens, 400, 3))
    driver.step()
    pool = scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    expected = freed_blocks(scheduler.kv_cache_manager, name)
    preempt(driver, name)
    assert pool.get_num_free_blocks() - before == expected


@SYNC_AND_ASYNC
@pytest.mark.parametrize("num_later", [0, 1, 3])
def test_running_requests_take_no_more_blocks_than_is_said(demo_model, is_async, num_later):
    """In the next step and so many later ones, with prompts in progress and few that decode."""
    driver = driver_for(demo_model, is_async=is_async, blocks=200, max_num_batched_tokens=96)
    for number in range(6):
        driver.add(job(f"r{number}", number, prompt=30 + 37 * number, think=60))
    scheduler = driver.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    while scheduler.requests:
        most = taken_blocks(scheduler, None, num_later)
        names = {request.request_id for request in scheduler.running}
        free = pool.get_num_free_blocks()
        for _ in range(1 + num_later):
            driver.step()
        if names != {request.request_id for request in scheduler.running}:
            continue
        assert free - pool.get_num_free_blocks() <= most


@pytest.mark.parametrize("groups", [(), (full_attention(), sliding_window(96))])
def test_blocks_of_running_requests_are_allocated_by_upstream_alone(
    demo_model, monkeypatch, groups
):
    """Hundreds are in a step; waiting ones alone are looked at, and nothing is left behind."""
    driver = driver_for(demo_model, blocks=60, max_num_batched_tokens=2000, groups=groups)
    manager, asked = driver.scheduler.kv_cache_manager, []
    # With a window the phase-aware manager has an attribute of its own there.
    own = vars(manager).get("allocate_slots")
    assert (own is not None) is bool(groups)
    ask = Refusals._ask
    monkeypatch.setattr(
        Refusals, "_ask", lambda self, *a, **k: asked.append(a[0].request_id) or ask(self, *a, **k)
    )
    for name in ("one", "other"):
        driver.add(job(name, len(name), think=30))
    for _ in range(20):
        driver.step()
        assert vars(manager).get("allocate_slots") == own
    assert asked == ["one", "other"]
