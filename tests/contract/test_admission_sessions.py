"""Admission beside paused streaming sessions, which hold KV blocks and seats."""

import random

import pytest
from scheduler_driver import Job, make_prompt
from tier_driver import driver_for
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from meridian_patch.engine.upstream import is_release

PAUSED = RequestStatus.WAITING_FOR_STREAMING_REQ


@pytest.fixture(autouse=True)
def stock_admission(monkeypatch):
    for name, value in {
        "time_sharing": "false",
        "step_cut": "false",
        "time_budget_us": "10000000",
    }.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name.upper()}", value)


def job(name, seed, *, prompt=60, think=300, answer=20):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer)


def learnt(demo_model, *, is_async, **options):
    driver = driver_for(
        demo_model, is_async=is_async, blocks=102, max_num_batched_tokens=512, **options
    )
    for number in range(24):
        driver.add(job(f"lesson{number}", number))
        if number % 6 == 5:
            driver.drain()
    return driver


def test_paused_sessions_without_blocks_keep_no_request_out(demo_model):
    """Upstream counts them among what runs: preempted on their last token, they hold a seat."""
    driver = learnt(demo_model, is_async=True)
    scheduler = driver.scheduler
    sessions = [
        driver.send_chunk(job(f"session{number}", 100 + number, prompt=40, think=5, answer=2))
        for number in range(6)
    ]
    last = 40 + 5 + 1 + 2 + 1
    while any(session.status != PAUSED for session in sessions):
        driver.step()
        for session in sessions:
            if session.num_computed_tokens == last - 1 and session in scheduler.running:
                scheduler.running.remove(session)
                scheduler._preempt_request(session, 0.0)
    driver.add(job("new", 200))
    for _ in range(400):
        driver.step()
    assert len(driver.deliveries["new"]) == 300 + 1 + 20 + 1


def pause_preempted(driver, session, last):
    """The session ends its turn while it is preempted, and waits without blocks for a chunk."""
    scheduler = driver.scheduler
    while session.status != PAUSED:
        driver.step()
        if session.num_computed_tokens == last - 1 and session in scheduler.running:
            scheduler.running.remove(session)
            scheduler._preempt_request(session, 0.0)
    assert session in scheduler.waiting or session in scheduler.kv_holding_waiting


def test_a_paused_session_at_the_front_keeps_no_request_out(demo_model):
    """It has no chunk: vLLM passes it over. Its forecast must not count as the newcomer's."""
    driver = learnt(demo_model, is_async=True)
    scheduler = driver.scheduler
    big = driver.send_chunk(job("big", 100, prompt=1700, think=5, answer=2))
    pause_preempted(driver, big, 1700 + 5 + 1 + 2 + 1)
    # Another request runs long; the pool of 3200 tokens has room for it and for the small one.
    driver.add(job("long", 300, prompt=1600, think=400, answer=5))
    for _ in range(12):
        driver.step()
    assert len(scheduler.running) == 1
    driver.add(job("small", 200, prompt=40, think=5, answer=5))
    for _ in range(100):
        driver.step()
    assert "long" in scheduler.requests
    assert driver.deliveries["small"], "kept out for 100 steps by a session without a chunk"


def test_a_pause_waits_for_what_runs_beside_such_a_session(demo_model):
    """PAUSED_NEW counts only kv_holding_waiting, but subtracts every paused session."""
    driver = learnt(demo_model, is_async=True)
    scheduler = driver.scheduler
    session = driver.send_chunk(job("s", 100, prompt=40, think=5, answer=2))
    pause_preempted(driver, session, 40 + 5 + 1 + 2 + 1)
    driver.add(job("runs", 300))
    for _ in range(5):
        driver.step()
    assert len(scheduler.running) == 1
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.get_num_unfinished_requests() == 1
    assert scheduler.has_unfinished_requests()


def test_a_session_with_a_queued_chunk_is_not_put_behind_all(demo_model):
    """Upstream enqueues a session that goes on ahead of all (kv_holding_waiting)."""
    assert waiting_behind_a_turn(learnt(demo_model, is_async=True))[0] == "s"


def test_the_queue_is_sorted_beside_a_session_with_a_queued_chunk(demo_model):
    """A request that is preempted afterwards is found, and put at its place."""
    driver = learnt(demo_model, is_async=True)
    waiting_behind_a_turn(driver)
    order, waiting = driver.scheduler.policy_parts.waiting_order, driver.scheduler.waiting
    places = [order.place_of(request) for request in waiting]
    assert places == sorted(places)


@pytest.mark.skipif(not is_release("0.33"), reason="vLLM loses such a session before 0.33")
def test_without_rules_it_waits_where_vllm_puts_it(demo_model, monkeypatch):
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    waiting = waiting_behind_a_turn(learnt(demo_model, is_async=True))
    assert waiting == ["later0", "later1", "later2", "s"]


def waiting_behind_a_turn(driver):
    """Who waits after the turn of a preempted session ended, whose next chunk is there."""
    scheduler = driver.scheduler
    first = job("s", 100, prompt=40, think=5, answer=2)
    session = driver.send_chunk(first)
    driver.send_chunk(first)  # the next chunk
    last, done = 40 + 5 + 1 + 2 + 1, False
    while session.num_prompt_tokens == 40:
        driver.step()
        if not done and session.num_computed_tokens == last - 1 and session in scheduler.running:
            scheduler.running.remove(session)
            scheduler._preempt_request(session, 0.0)
            done = True
            for number in range(3):
                driver.add(job(f"later{number}", 400 + number))
            scheduler.max_num_active_reqs = 0
    return [request.request_id for request in scheduler.waiting]
