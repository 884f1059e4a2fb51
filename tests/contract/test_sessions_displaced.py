"""Time-sharing displaces streaming sessions as it does other requests, and loses none."""

import pytest
from full_pool import (
    BLOCKS,
    job,
    newcomer,
    num_preempted_for_room,
    share_time_alone,
    taught_driver,
)
from scheduler_driver import Driver, engine_config
from tier_driver import SYNC_AND_ASYNC, scheduler_class, step_until
from vllm.v1.request import RequestStatus

from meridian_patch.phase.tracker import Phase

PAUSED = RequestStatus.WAITING_FOR_STREAMING_REQ


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    share_time_alone(monkeypatch)


def full_pool(demo_model, session, *, is_async):
    """A session and another thinker hold most of the pool; what tokens cost is known."""
    driver = taught_driver(demo_model, is_async=is_async)
    opened = driver.send_chunk(session)
    driver.add(job("other", 51, think=500, answer=5))
    driver.scheduler.requests["other"].priority = -1
    return driver, opened


def steps_until(driver, condition):
    for _ in range(2000):
        if condition():
            return
        driver.step()
    raise AssertionError("it never came to that")


def preempt_in_flight(driver, session):
    """As upstream does for want of blocks: what is in flight is delivered later."""
    driver.scheduler.running.remove(session)
    driver.scheduler._preempt_request(session, 0.0)


@SYNC_AND_ASYNC
def test_a_session_makes_room(demo_model, is_async):
    """Under asynchronous scheduling a token of a running request is always on the way."""
    driver, session = full_pool(
        demo_model, job("s", 50, think=700, answer=5, max_tokens=800), is_async=is_async
    )
    step_until(driver, "s", Phase.THINK, 290)
    driver.add(newcomer(BLOCKS - 22))
    steps_until(driver, lambda: driver.deliveries["new"])
    assert num_preempted_for_room(driver) == 1
    assert session.num_preemptions == 1
    steps_until(driver, lambda: session.status == PAUSED)
    assert len(driver.deliveries["s"]) == 700 + 1 + 5 + 1


@pytest.mark.parametrize("is_queued", [False, True], ids=["later", "queued"])
def test_a_session_whose_last_token_is_on_the_way_is_preempted(demo_model, is_queued):
    """Its turn ends while it is displaced; its next turn knows all that was said."""
    said, first = 300, job("s", 50, think=700, answer=5, max_tokens=300)
    driver, session = full_pool(demo_model, first, is_async=True)
    chunk = job("s", 53, prompt=40, think=20, answer=5)
    if is_queued:
        driver.send_chunk(chunk)
        driver.jobs["s"] = first
    last = len(first.prompt) + said - 1
    steps_until(driver, lambda: session.num_computed_tokens == last)
    assert session.num_in_flight_tokens
    driver.add(newcomer(BLOCKS - 22))
    preempt_in_flight(driver, session)
    driver.step()
    assert session.num_preemptions == 1
    driver.jobs["s"] = chunk
    if not is_queued:
        assert session.status == PAUSED
        for _ in range(5):
            driver.step()
        driver.send_chunk(chunk)
    assert session.num_prompt_tokens == len(first.prompt) + said - 1 + len(chunk.prompt)
    steps_until(driver, lambda: session.status == PAUSED)
    assert len(driver.deliveries["s"]) == said + 20 + 1 + 5 + 1
    assert not driver.scheduler.phase_counters.totals.get("fallback:exception")


def test_a_session_that_goes_on_stays_ahead_of_later_requests(demo_model):
    """It was displaced to the back of the queue, ended its turn there, and waits in front now."""
    first = job("s", 50, think=700, answer=5, max_tokens=300)
    driver, session = full_pool(demo_model, first, is_async=True)
    last = len(first.prompt) + first.max_tokens - 1
    steps_until(driver, lambda: session.num_computed_tokens == last)
    driver.add(newcomer(BLOCKS - 22))
    preempt_in_flight(driver, session)
    driver.step()
    assert session.status == PAUSED
    driver.scheduler.max_num_active_reqs = 0
    driver.send_chunk(job("s", 53, prompt=40, think=20, answer=5))
    for number in range(3):
        driver.add(job(f"later{number}", 60 + number))
    waiting = [each.request_id for each in driver.scheduler.waiting]
    assert waiting == ["s", "later0", "later1", "later2"]


@pytest.mark.parametrize("is_stock", [True, False], ids=["stock", "ours"])
def test_a_paused_session_that_never_ran_waits_behind_loaded_requests(demo_model, is_stock):
    """It holds no blocks. One that was preempted holds none either, and is kept apart all the same.

    vLLM's own tests pause a session so; its engine pauses none before it ran.
    """
    config = engine_config(demo_model, is_async=False, blocks=BLOCKS)
    chosen = None if is_stock else scheduler_class(is_async=False)
    driver = Driver.build(chosen, config, is_async=False, tiered=not is_stock)
    scheduler = driver.scheduler
    paused, preempted, loading = (
        driver.send_chunk(job(name, 60 + number))
        for number, name in enumerate(("paused", "preempted", "loading"))
    )
    for request in (paused, preempted, loading):
        scheduler.waiting.remove_request(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS if request is loading else PAUSED
    preempted.num_preemptions = 1
    scheduler.num_waiting_for_streaming_input = 2
    for request in (paused, preempted, loading):
        scheduler._enqueue_waiting_request(request)
    holding = {request.request_id for request in scheduler.kv_holding_waiting}
    assert holding == {"loading"} | (set() if is_stock else {"preempted"})
    assert paused in scheduler.waiting
