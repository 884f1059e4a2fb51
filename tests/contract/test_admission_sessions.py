"""Admission beside paused streaming sessions, which hold KV blocks and seats."""

import random

import pytest
from scheduler_driver import TURN_END, Job, make_prompt
from tier_driver import SYNC_AND_ASYNC, driver_for
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

PAUSED = RequestStatus.WAITING_FOR_STREAMING_REQ


@pytest.fixture(autouse=True)
def admission(monkeypatch):
    for name, value in {
        "admission": "true",
        "admission_overcommit": "1.0",
        "time_sharing": "false",
        "step_cut": "false",
        "time_budget_us": "10000000",
    }.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name.upper()}", value)


def job(name, seed, *, prompt=60, think=300, answer=20):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer)


def open_session(driver, one):
    driver.jobs[one.request_id], driver.deliveries[one.request_id] = one, []
    parameters = SamplingParams(temperature=0, max_tokens=one.max_tokens)
    parameters.update_from_generation_config({}, TURN_END)
    request = Request(
        request_id=one.request_id,
        prompt_token_ids=list(one.prompt),
        sampling_params=parameters,
        pooling_params=None,
        resumable=True,
        block_hasher=get_request_block_hasher(driver.hash_block_size, sha256),
    )
    driver.scheduler.add_request(request)
    return request


def learnt(demo_model, *, is_async, **options):
    driver = driver_for(
        demo_model, is_async=is_async, blocks=102, max_num_batched_tokens=512, **options
    )
    for number in range(24):
        driver.add(job(f"lesson{number}", number))
        if number % 6 == 5:
            driver.drain()
    return driver


@SYNC_AND_ASYNC
def test_what_paused_sessions_hold_is_no_room(demo_model, is_async):
    """Half of the pool is theirs; admitted are as many as fit into the other half."""
    driver = learnt(demo_model, is_async=is_async)
    sessions = [
        open_session(driver, job(f"session{number}", 100 + number, prompt=400, think=5, answer=2))
        for number in range(4)
    ]
    while any(session.status != PAUSED for session in sessions):
        driver.step()
    before = driver.scheduler.phase_counters.totals.get("preemption:think", 0)
    for number in range(12):
        driver.add(job(f"new{number}", 200 + number))
    for _ in range(1500):
        driver.step()
    assert all(driver.deliveries[f"new{number}"] for number in range(12))
    assert driver.scheduler.phase_counters.totals.get("preemption:think", 0) == before


def test_paused_sessions_without_blocks_keep_no_request_out(demo_model):
    """Upstream counts them among what runs: preempted on their last token, they hold a seat."""
    driver = learnt(demo_model, is_async=True)
    scheduler = driver.scheduler
    sessions = [
        open_session(driver, job(f"session{number}", 100 + number, prompt=40, think=5, answer=2))
        for number in range(6)
    ]
    last = 40 + 5 + 1 + 2 + 1
    while any(session.status != PAUSED for session in sessions):
        driver.step()
        for session in sessions:
            if session.num_computed_tokens == last - 1 and session in scheduler.running:
                scheduler.running.remove(session)
                scheduler._preempt_request(session, 0.0)
    assert not scheduler.kv_holding_waiting
    driver.add(job("new", 200))
    for _ in range(400):
        driver.step()
    assert len(driver.deliveries["new"]) == 300 + 1 + 20 + 1
