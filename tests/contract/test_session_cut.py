"""The step cut beside streaming sessions, on vLLM's real scheduler."""

import random

import pytest
from scheduler_driver import STEP_S, TOKEN_S, Job, make_prompt
from tier_driver import SYNC_AND_ASYNC, driver_for, step_until
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import RequestStatus

from meridian_patch.phase.tracker import Phase

BUDGET = 512
# What attention over one token more costs each token of a chunk, on the driver's clock.
ATTENDED_S = 2e-7


def job(name, seed, *, prompt=60, think=50, answer=20):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer)


@SYNC_AND_ASYNC
def test_the_next_chunk_of_a_session_keeps_the_step_short(demo_model, monkeypatch, is_async):
    """The session holds blocks and waits in a queue of its own while another request answers."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US", "10000000")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__ANSWER_ITL_MS", "20.0")
    driver = driver_for(demo_model, is_async=is_async, blocks=200, max_num_batched_tokens=BUDGET)
    scheduler = driver.scheduler
    for number in range(12):
        driver.add(job(f"lesson{number}", number, prompt=50 + 40 * number, think=20, answer=5))
        driver.drain()
    driver.send_chunk(job("session", 60, think=2, answer=2))
    while scheduler.requests["session"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        driver.step()
    driver.add(job("reader", 50, think=5, answer=300))
    step_until(driver, "reader", Phase.ANSWER)
    driver.send_chunk(job("session", 61, prompt=400, think=2, answer=2))
    largest = max(driver.step().num_scheduled_tokens.get("session", 0) for _ in range(10))
    assert 0 < largest < 1.3 * (0.020 - STEP_S) / TOKEN_S


def pause_session(driver):
    driver.send_chunk(job("session", 60, think=2, answer=2))
    while driver.scheduler.requests["session"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        driver.step()


def read(driver):
    for number in range(12):
        driver.add(job(f"lesson{number}", number, prompt=50 + 40 * number, think=20, answer=5))
        driver.drain()
    pause_session(driver)
    driver.add(job("reader", 50, think=5, answer=1200))
    step_until(driver, "reader", Phase.ANSWER)


@pytest.fixture
def tight(monkeypatch):
    """Cuts leave next to nothing for prompts, and the saturation guard does not come to help."""
    for name, value in {
        "ANSWER_ITL_MS": "10.5",
        "MIN_PREFILL_TOKENS": "1",
        "TIME_BUDGET_US": "10000000",
        "DRAIN_S": "100000",
    }.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name}", value)


def test_media_items_come_in_beside_a_paused_session(demo_model, tight):
    """What the next prompt must have room for is that of the one behind the session."""
    driver = driver_for(
        demo_model, blocks=400, disable_chunked_mm_input=True, max_num_batched_tokens=512
    )
    scheduler = driver.scheduler
    scheduler.max_num_encoder_input_tokens = 2000
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=2000)
    read(driver)
    driver.add(job("image", 51, prompt=500, think=2, answer=2))
    place = PlaceholderRange(offset=0, length=300)
    scheduler.requests["image"].mm_features = [
        MultiModalFeatureSpec(data=None, modality="image", identifier="an image", mm_position=place)
    ]
    for _ in range(200):
        driver.step()
    assert driver.deliveries["image"]


def test_a_paused_session_stops_no_cut_without_chunked_prefill(demo_model, tight):
    """Nothing of it is to be computed."""
    driver = driver_for(
        demo_model, blocks=400, max_num_batched_tokens=2048, enable_chunked_prefill=False
    )
    read(driver)
    for number in range(4):
        driver.add(job(f"r{number}", 70 + number, prompt=600, think=2, answer=2))
    largest = max(driver.step().total_num_scheduled_tokens for _ in range(20))
    assert 600 <= largest < 700


@SYNC_AND_ASYNC
def test_what_a_session_holds_counts_for_its_next_chunk(demo_model, monkeypatch, is_async):
    """Attention over what stands before a chunk costs time, in the first step with it too."""
    for name, value in {
        "ANSWER_ITL_MS": "20.0",
        "MIN_PREFILL_TOKENS": "1",
        "TIME_BUDGET_US": "10000000",
    }.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name}", value)
    driver = driver_for(demo_model, is_async=is_async, blocks=200, max_num_batched_tokens=BUDGET)
    scheduler, deliver = driver.scheduler, driver._deliver

    def deliver_late():
        output, _ = driver._in_flight[0]
        for name, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests.get(name)
            if tokens > 1 and request is not None:
                driver.now_s += tokens * request.num_computed_tokens * ATTENDED_S
        deliver()

    driver._deliver = deliver_late
    for number in range(12):
        driver.add(job(f"lesson{number}", number, prompt=50 + 100 * number, think=20, answer=5))
        driver.drain()
    driver.send_chunk(job("session", 60, prompt=1200, think=2, answer=2))
    while scheduler.requests["session"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        driver.step()
    driver.add(job("reader", 50, think=5, answer=300))
    step_until(driver, "reader", Phase.ANSWER)
    driver.send_chunk(job("session", 61, prompt=400, think=2, answer=2))
    chunks = [driver.step().num_scheduled_tokens.get("session", 0) for _ in range(10)]
    first, second = [tokens for tokens in chunks if tokens][:2]
    assert second <= first < 1.3 * second
