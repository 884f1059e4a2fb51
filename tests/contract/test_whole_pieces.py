"""Prompts that upstream schedules whole or in whole pieces are not kept out by a step's cut."""

import gc
import random
import weakref

import pytest
from scheduler_driver import BLOCK_SIZE, Job, aligned_mamba, full_attention, make_prompt
from tier_driver import SYNC_AND_ASYNC, driver_for, preempt, step_until
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import RequestStatus

from meridian_patch.engine.upstream import is_release
from meridian_patch.phase.tracker import Phase

# So short that a cut leaves room for some tokens of prefill only.
TIGHT = {"ANSWER_ITL_MS": "10.5", "MIN_PREFILL_TOKENS": "1", "TIME_BUDGET_US": "10000000"}


@pytest.fixture
def tight(monkeypatch):
    """Cuts leave next to nothing for prompts, and the saturation guard does not come to help."""
    for name, value in {**TIGHT, "DRAIN_S": "100000"}.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name}", value)


def job(name, prompt=60, think=5, answer=5):
    tokens = make_prompt(random.Random(name), prompt, thinks=True, shared=sum(map(ord, name)))
    return Job(name, tuple(tokens), think, answer)


def read(driver, readers=1):
    """Readers are under way, and the model has learnt what steps take."""
    for number in range(12):
        driver.add(job(f"lesson{number}", prompt=50 + 40 * number))
        driver.drain()
    for number in range(readers):
        driver.add(job(f"reader{number}", answer=1200))
    for number in range(readers):
        step_until(driver, f"reader{number}", Phase.ANSWER)


def steps_until_begun(driver, name, limit=500):
    """Steps until the request's first token, and the largest of them."""
    steps = largest = 0
    while not driver.deliveries[name] and steps < limit:
        largest = max(largest, driver.step().total_num_scheduled_tokens)
        steps += 1
    assert "reader0" in driver.scheduler.requests
    return steps, largest


def unchunked(demo_model, is_async, **engine_args):
    return driver_for(
        demo_model,
        is_async=is_async,
        blocks=400,
        enable_chunked_prefill=False,
        max_num_batched_tokens=2048,
        **engine_args,
    )


@SYNC_AND_ASYNC
def test_without_chunked_prefill_prompts_above_the_cut_come_in(demo_model, tight, is_async):
    """One by one, each in a step of its own; those behind it do not wait for ever."""
    driver = unchunked(demo_model, is_async)
    read(driver)
    driver.add(job("long", prompt=1000))
    driver.add(job("longer", prompt=1300))
    driver.add(job("short", prompt=100))
    for name, most in (("long", 15), ("longer", 15), ("short", 15)):
        steps, largest = steps_until_begun(driver, name)
        assert steps <= most
        assert largest < 1400
    assert not driver.scheduler.phase_counters.totals.get("fallback:exception")


def test_without_chunked_prefill_a_request_that_is_not_ready_does_not_block_others(
    demo_model, tight
):
    """Upstream passes it over; the one behind it is longer than the room kept for the first."""
    driver = unchunked(demo_model, is_async=False)
    read(driver)
    driver.add(job("remote", prompt=100))
    driver.scheduler.requests["remote"].status = RequestStatus.WAITING_FOR_REMOTE_KVS
    driver.add(job("long", prompt=1000))
    assert steps_until_begun(driver, "long")[0] <= 15


def hybrid(demo_model, **engine_args):
    """A model whose Mamba state is cached at block boundaries."""
    driver = driver_for(
        demo_model,
        blocks=600,
        groups=(full_attention(), aligned_mamba()),
        max_num_seqs=48,
        mamba_cache_mode="align",
        **engine_args,
    )
    assert driver.scheduler.need_mamba_block_aligned_split
    return driver


def test_mamba_chunks_reach_a_block_boundary(demo_model, tight):
    """State is cached at block boundaries: a cut below a block would let no prompt in."""
    driver = hybrid(demo_model)
    read(driver, readers=32)
    driver.add(job("long", prompt=10 * BLOCK_SIZE + 5))
    driver.add(job("behind", prompt=3 * BLOCK_SIZE))
    steps, largest = steps_until_begun(driver, "long")
    assert steps <= 40
    assert largest <= 34 + 2 * BLOCK_SIZE
    assert steps_until_begun(driver, "behind")[0] <= 40


def add_with_image(driver, name, prompt, offset, length):
    driver.add(job(name, prompt=prompt))
    request = driver.scheduler.requests[name]
    place = PlaceholderRange(offset=offset, length=length)
    feature = MultiModalFeatureSpec(
        data=None, modality="image", identifier=f"image of {name}", mm_position=place
    )
    request.mm_features = [feature]
    assert request.has_encoder_inputs
    return request


@pytest.mark.parametrize("offset", [0, 7])
def test_media_items_that_must_be_whole_are_not_cut(demo_model, tight, offset):
    """No chunk ends within an image, whatever the cut, and prompts with images come in."""
    driver = driver_for(
        demo_model, blocks=400, disable_chunked_mm_input=True, max_num_batched_tokens=512
    )
    scheduler = driver.scheduler
    scheduler.max_num_encoder_input_tokens = 2000
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=2000)
    read(driver)
    request = add_with_image(driver, "image", 500, offset, 300)
    other = add_with_image(driver, "other", 450, offset, 250)
    ends = {"image": [], "other": []}
    for _ in range(300):
        driver.step()
        for each in (request, other):
            ends[each.request_id].append(min(each.num_computed_tokens, 450))
    assert driver.deliveries["image"]
    assert driver.deliveries["other"]
    assert not [end for end in ends["image"] if offset < end < offset + 300]
    assert not [end for end in ends["other"] if offset < end < offset + 250]
    assert not scheduler.phase_counters.totals.get("fallback:exception")


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        pytest.param(
            BLOCK_SIZE * 2 - 1,
            BLOCK_SIZE - 9,
            # It refuses the configuration, too.
            marks=pytest.mark.skipif(is_release("0.33"), reason="vLLM 0.33 never computes it"),
        ),
        (BLOCK_SIZE * 2, BLOCK_SIZE + 9),
    ],
    ids=["ends-within", "ends-behind"],
)
def test_media_items_across_a_mamba_boundary_come_in(demo_model, tight, offset, length):
    """A chunk ends at the boundary: within the item, as in stock, or at the next one behind it."""
    driver = hybrid(demo_model, disable_chunked_mm_input=True, max_num_batched_tokens=512)
    scheduler = driver.scheduler
    scheduler.max_num_encoder_input_tokens = 2000
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=2000)
    read(driver)
    request = add_with_image(driver, "image", BLOCK_SIZE * 6 + 5, offset, length)
    ends = []
    for _ in range(20):
        driver.step()
        ends.append(request.num_computed_tokens)
    assert driver.deliveries["image"]
    within = {end for end in ends if offset < end < offset + length}
    assert within == ({BLOCK_SIZE * 2} if offset % BLOCK_SIZE else set())
    assert not scheduler.phase_counters.totals.get("fallback:exception")


def test_a_seed_stops_cuts_while_its_prompt_is_due_only(demo_model, tight):
    """When it decodes, others are cut again; when it is preempted, no more."""
    driver = driver_for(demo_model, blocks=400, max_num_batched_tokens=512)
    read(driver)
    driver.add(job("seeded", prompt=400, think=500), seed=7)
    assert max(driver.step().num_scheduled_tokens.values()) == 400
    driver.add(job("long", prompt=400))
    assert max(driver.step().num_scheduled_tokens.values()) < 50
    request = driver.scheduler.requests["seeded"]
    preempt(driver, "seeded")
    driver.step()
    assert not request.is_prefill_chunk


def test_a_rule_that_is_not_known_here_does_not_starve_a_prompt(demo_model, tight):
    """Upstream refuses chunks below 300 tokens: after some steps one comes with a whole budget."""
    driver = driver_for(demo_model, blocks=400, max_num_batched_tokens=512)
    scheduler = driver.scheduler
    read(driver)

    def refuse(request, num_computed_tokens, num_new_tokens):
        is_end = num_computed_tokens + num_new_tokens >= request.num_tokens
        return num_new_tokens if is_end or num_new_tokens >= 300 else 0

    scheduler._reserve_prefill_lookahead = refuse
    driver.add(job("long", prompt=1200))
    assert steps_until_begun(driver, "long")[0] <= 60


def test_a_full_pool_is_no_reason_for_a_step_without_a_cut(demo_model, tight):
    """Nothing could come in: no step has the whole budget when the pool has room again."""
    driver = driver_for(demo_model, blocks=60, max_num_batched_tokens=512)
    read(driver)
    driver.add(job("holds", prompt=BLOCK_SIZE * 40, think=5, answer=40))
    step_until(driver, "holds", Phase.ANSWER)
    driver.add(job("long", prompt=BLOCK_SIZE * 30))
    kept_out = 0
    while "holds" in driver.scheduler.requests:
        driver.step()
        kept_out += 1
    assert kept_out > 20
    assert driver.scheduler.requests["long"] in driver.scheduler.waiting
    largest = max(driver.step().total_num_scheduled_tokens for _ in range(20))
    assert 1 < largest < 50


def test_a_prompt_that_was_computed_whole_is_not_kept(demo_model):
    """Requests with a seed, beside which no step is cut: they do not think. One is preempted."""
    driver = driver_for(demo_model, blocks=200)
    requests = []
    for number in range(3):
        tokens = make_prompt(random.Random(number), 60, thinks=False)
        driver.add(Job(f"r{number}", tuple(tokens), None, 5), seed=7)
        requests.append(weakref.ref(driver.scheduler.requests[f"r{number}"]))
    for _ in range(2):
        driver.step()
        preempt(driver, "r0")
    driver.drain()
    gc.collect()
    assert not any(request() for request in requests)
