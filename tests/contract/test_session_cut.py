"""The step cut beside streaming sessions, on vLLM's real scheduler."""

import random

from scheduler_driver import STEP_S, TOKEN_S, TURN_END, Job, make_prompt
from tier_driver import SYNC_AND_ASYNC, driver_for, step_until
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from meridian_patch.phase.tracker import Phase

BUDGET = 512


def job(name, seed, *, prompt=60, think=50, answer=20):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer)


def send(driver, one):
    """One chunk of a session; the first one opens it."""
    driver.jobs[one.request_id] = one
    driver.deliveries.setdefault(one.request_id, [])
    parameters = SamplingParams(temperature=0, max_tokens=one.max_tokens)
    parameters.update_from_generation_config({}, TURN_END)
    driver.scheduler.add_request(
        Request(
            request_id=one.request_id,
            prompt_token_ids=list(one.prompt),
            sampling_params=parameters,
            pooling_params=None,
            resumable=True,
            block_hasher=get_request_block_hasher(driver.hash_block_size, sha256),
        )
    )


@SYNC_AND_ASYNC
def test_the_next_chunk_of_a_session_keeps_the_step_short(demo_model, monkeypatch, is_async):
    """It holds blocks, and waits in a queue of its own; somebody else reads an answer."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US", "10000000")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__ANSWER_ITL_MS", "20.0")
    driver = driver_for(demo_model, is_async=is_async, blocks=200, max_num_batched_tokens=BUDGET)
    scheduler = driver.scheduler
    for number in range(12):
        driver.add(job(f"lesson{number}", number, prompt=50 + 40 * number, think=20, answer=5))
        driver.drain()
    send(driver, job("session", 60, think=2, answer=2))
    while scheduler.requests["session"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        driver.step()
    driver.add(job("reader", 50, think=5, answer=300))
    step_until(driver, "reader", Phase.ANSWER)
    send(driver, job("session", 61, prompt=400, think=2, answer=2))
    largest = max(driver.step().num_scheduled_tokens.get("session", 0) for _ in range(10))
    assert 0 < largest < 1.3 * (0.020 - STEP_S) / TOKEN_S
