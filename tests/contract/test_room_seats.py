"""Who makes room for a request that lacks a seat, on vLLM's real scheduler."""

import pytest
from full_pool import (
    filled_driver,
    job,
    newcomer,
    num_preempted_for_room,
    share_time_alone,
    taught_driver,
)
from scheduler_driver import BLOCK_SIZE, aligned_mamba, full_attention, sliding_window
from vllm.v1.request import RequestStatus
from vllm.v1.worker import worker_base

from meridian_patch.patching.candidate import MARK


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    share_time_alone(monkeypatch)


@pytest.mark.parametrize(
    ("groups", "free", "more"),
    [
        ((full_attention(),), 60, {}),
        ((full_attention(), *[sliding_window(64)] * 5), 185, {}),
        (
            (full_attention(), *[aligned_mamba()] * 3),
            93,
            {"mamba_cache_mode": "align", "max_num_batched_tokens": 4 * BLOCK_SIZE},
        ),
    ],
    ids=["full", "windows", "mamba"],
)
def test_a_seat_is_taken_where_the_blocks_suffice(demo_model, groups, free, more):
    """As upstream counts them: windows and recurrent states hold less than the whole prompt."""
    driver = filled_driver(
        demo_model, is_async=False, blocks=400, groups=groups, max_num_seqs=2, **more
    )
    driver.add(newcomer(50))
    new = driver.scheduler.requests["new"]
    pool = driver.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - free)
    for _ in range(8):
        driver.step()
        if new.status == RequestStatus.RUNNING:
            break
    assert new.status == RequestStatus.RUNNING
    assert num_preempted_for_room(driver) == 1


def thinking(demo_model, number):
    """Five seats, two of them and so many more taken by requests that have thought for long."""
    driver = filled_driver(demo_model, is_async=False, blocks=400, max_num_seqs=5)
    for place in range(number):
        driver.add(job(f"thinker {place}", 70 + place, think=600, answer=5))
    for _ in range(260):
        driver.step()
    return driver


def test_no_seat_is_taken_for_a_request_behind_loaded_ones(demo_model):
    """Upstream admits requests that hold blocks first; a seat would go to one of those."""
    driver = thinking(demo_model, 3)
    for place in range(4):
        hold(driver, f"loaded {place}", 80 + place)
    driver.add(job("new", 99, prompt=40, think=30, answer=3))
    for _ in range(4):
        driver.step()
    assert num_preempted_for_room(driver) == 0
    assert driver.scheduler.requests["new"].status == RequestStatus.WAITING


def hold(driver, name, seed):
    """Let a request wait with blocks, as after its KV was loaded."""
    driver.add(newcomer(4, name, seed))
    scheduler = driver.scheduler
    request = scheduler.requests[name]
    scheduler.waiting.remove_request(request)
    manager = scheduler.kv_cache_manager
    assert manager.allocate_slots(request, 2 * BLOCK_SIZE, has_scheduled_reqs=False) is not None
    request.num_computed_tokens = 2 * BLOCK_SIZE
    scheduler.kv_holding_waiting.add_request(request)


def test_no_seat_is_taken_while_prompts_use_up_the_step(demo_model):
    """The seat would stay empty until they have ended."""
    driver = thinking(demo_model, 2)
    for place in range(2):
        driver.add(job(f"long {place}", 97 + place, prompt=1900, think=5, answer=3))
        driver.step()
    driver.add(job("new", 96, prompt=40, think=30, answer=3))
    new = driver.scheduler.requests["new"]
    waited = 0
    while new.status != RequestStatus.RUNNING:
        before = num_preempted_for_room(driver)
        driver.step()
        waited = waited + 1 if before else 0
        # A step may pass between a preemption and the admission.
        assert waited <= 1


@pytest.mark.parametrize("mode", ["off", "observe", "enforce"])
def test_a_seat_is_taken_beside_those_kept_for_probes(demo_model, monkeypatch, mode):
    """In mode enforce one seat of sixteen is kept; all others are taken, and one comes free."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__MODE", mode)
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__EAT_WARMUP_PROBES", "1000")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__RPDI", "false")
    monkeypatch.setattr(worker_base.WorkerBase, MARK, "worker", raising=False)
    driver = taught_driver(demo_model, is_async=False, blocks=900, max_num_seqs=16)
    for place in range(18):
        driver.add(job(f"thinker {place}", 70 + place, think=1200, answer=5))
    for _ in range(260):
        driver.step()
    scheduler = driver.scheduler
    waiting = len(scheduler.waiting)
    assert waiting == (3 if mode == "enforce" else 2)
    driver.add(job("new", 99, prompt=40, think=30, answer=3))
    new = scheduler.requests["new"]
    for _ in range(12):
        driver.step()
    assert new.status == RequestStatus.RUNNING
    assert num_preempted_for_room(driver)
