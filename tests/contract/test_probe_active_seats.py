"""No probe is made for nothing: seats are counted as upstream admits, and blocks are asked for."""

import pytest
from exit_driver import exit_driver, thinker
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

NEVER = {"EXIT__EAT_DELTA": "0.000000000001", "EXIT__EAT_WARMUP_PROBES": "1000"}


def fill(driver, number):
    for index in range(number):
        driver.add(thinker(f"user{index}", 600))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_full_batches_are_probed_below_the_slots_of_the_runner(monkeypatch, demo_model, is_async):
    """``max_num_active_seqs`` bounds admission: a seat of these is kept for probes."""
    driver = exit_driver(
        monkeypatch,
        demo_model,
        is_async=is_async,
        blocks=900,
        engine_args={"max_num_seqs": 32, "max_num_active_seqs": 16},
    )
    fill(driver, 40)
    driver.drain()
    assert driver.scheduler.phase_counters.totals.get("exit:eat", 0) == 40


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_probe_is_made_for_seats_that_paused_sessions_hold(monkeypatch, demo_model, is_async):
    """Upstream counts them among the running requests."""
    settings = {**NEVER, "EXIT__MODE": "observe"}
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, blocks=900, **settings)
    scheduler = driver.scheduler
    scheduler.add_request(
        Request(
            request_id="session",
            prompt_token_ids=[65] * 10,
            sampling_params=SamplingParams(temperature=0, max_tokens=1),
            pooling_params=None,
            resumable=True,
        )
    )
    driver.jobs["session"], driver.deliveries["session"] = thinker("session"), []
    while scheduler.requests["session"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        driver.step()
    fill(driver, scheduler.max_num_running_reqs - 1)
    for _ in range(40):
        driver.step()
    made, probes = [], scheduler.early_exit.probes
    monkeypatch.setattr(probes, "_make", lambda *args: made.append(args))
    for _ in range(40):
        driver.step()
    assert len(scheduler.running) == scheduler.max_num_running_reqs - 1
    assert not made


def test_no_probe_is_made_while_no_block_is_free(monkeypatch, demo_model):
    """Making one takes milliseconds where the thought is long, in every step of a full pool."""
    settings = {**NEVER, "EXIT__MODE": "observe", "EXIT__PROBE_MIN_GAP_TOKENS": "4"}
    driver = exit_driver(monkeypatch, demo_model, blocks=200, **settings)
    probes, made = driver.scheduler.early_exit.probes, []
    make = probes._make
    monkeypatch.setattr(probes, "_make", lambda *args: made.append(args) or make(*args))
    fill(driver, 4)
    while not probes.num_probes:
        driver.step()
    # Their last blocks are new: the thoughts themselves take none for a while.
    while any(len(one._all_token_ids) % 32 not in (3, 4) for one in driver.scheduler.running):
        driver.step()
    pool = driver.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    made.clear()
    for _ in range(24):
        driver.step()
    assert len(probes) and not made
    pool.free_blocks(taken)
    driver.step()
    assert made
