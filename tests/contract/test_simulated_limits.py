"""What vLLM's own schedulers do that the simulation allows for, or keeps out of its cases."""

import random
import time

import pytest
from scheduler_driver import TURN_END, WORD, Driver, Job, engine_config, make_prompt
from simulator.axes import draw
from simulator.workload import Workload
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine.upstream import is_release

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
MENDED = pytest.mark.skipif(is_release("0.33"), reason="mended in vLLM 0.33")
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


def stock(demo_model, *, is_async, **engine_args):
    # Settings of drafts cannot be the key of a cache.
    make = engine_config.__wrapped__
    config = make(demo_model, is_async=is_async, blocks=40, **engine_args)
    return Driver.build(None, config, is_async=is_async)


def add(driver, name, adapter=0):
    prompt = make_prompt(random.Random(0), 40, thinks=False)
    driver.add(Job(name, tuple(prompt), None, 60))
    request = driver.scheduler.requests[name]
    if adapter:
        request.lora_request = LoRARequest(f"adapter{adapter}", adapter, f"adapter{adapter}")
    return request


def deliver(driver, output, sampled):
    names = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[sampled.get(name, []) for name in names],
    )
    driver.scheduler.update_from_output(output, result)


def chunk_of(driver, name, tokens):
    parameters = SamplingParams(temperature=0, max_tokens=1)
    parameters.update_from_generation_config({}, TURN_END)
    return Request(
        request_id=name,
        prompt_token_ids=[WORD] * tokens,
        sampling_params=parameters,
        pooling_params=None,
        resumable=True,
        block_hasher=get_request_block_hasher(driver.hash_block_size, sha256),
    )


def test_a_request_that_waits_with_blocks_comes_in_before_all_others(demo_model):
    """So a session's next chunk comes in before an answer that was preempted."""
    driver = stock(demo_model, is_async=False)
    driver.jobs["session"] = Job("session", (WORD,) * 40, None, 60)
    driver.deliveries["session"] = []
    session = chunk_of(driver, "session", 40)
    driver.scheduler.add_request(session)
    while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        driver.step()
    add(driver, "first")
    driver.scheduler.add_request(chunk_of(driver, "session", 20))
    assert list(driver.step().num_scheduled_tokens) == ["session", "first"]


@MENDED
def test_a_session_whose_turn_ends_while_it_is_preempted_stands_in_no_queue(demo_model):
    """Its next chunk was there. Most of `preempted_sessions` is for vLLM 0.32 alone."""
    driver = stock(demo_model, is_async=True)
    scheduler = driver.scheduler
    session = chunk_of(driver, "session", 40)
    scheduler.add_request(session)
    scheduler.add_request(chunk_of(driver, "session", 20))
    step = scheduler.schedule()
    scheduler.running.remove(session)
    scheduler._preempt_request(session, time.monotonic())
    deliver(driver, step, {"session": [WORD]})
    assert session.status == RequestStatus.WAITING
    assert scheduler.requests["session"] is session
    assert not scheduler.waiting
    assert not scheduler.kv_holding_waiting
    assert not scheduler.running


def test_drafts_for_a_preempted_request_are_computed_before_their_token(demo_model):
    """Once mended upstream, the simulated engine may hand drafts to preempted requests."""
    driver = stock(demo_model, is_async=False, speculative_config=DRAFTS)
    scheduler, drafts = driver.scheduler, DraftTokenIds(["one"], [[66]])
    request = add(driver, "one")
    deliver(driver, scheduler.schedule(), {"one": [WORD]})
    scheduler.update_draft_token_ids(drafts)
    step = scheduler.schedule()
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    deliver(driver, step, {"one": [WORD]})
    scheduler.update_draft_token_ids(drafts)
    assert list(scheduler.schedule().num_scheduled_tokens) == ["one"]
    # The token that the drafts follow is on its way: pipeline parallelism schedules meanwhile.
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"one": 1}
    assert step.scheduled_spec_decode_tokens == {"one": [66]}


@MENDED
def test_a_request_that_sits_out_a_step_lets_one_adapter_too_many_in(demo_model):
    """Without vLLM 0.32 adapters may be scarce where drafts are scheduled ahead."""
    settings = {"speculative_config": DRAFTS, "max_model_len": 46, **LORA}
    driver = stock(demo_model, is_async=True, **settings)
    scheduler = driver.scheduler
    add(driver, "one", adapter=1)
    add(driver, "two", adapter=2)
    deliver(driver, scheduler.schedule(), {"one": [WORD]})
    step = scheduler.schedule()
    assert list(step.num_scheduled_tokens) == ["one"]
    # With all its drafts it is as long as it may be.
    assert list(scheduler.schedule().num_scheduled_tokens) == ["two"]
    deliver(driver, step, {"one": [WORD]})
    with pytest.raises(AssertionError):
        scheduler.schedule()


def test_a_turn_has_one_name_whichever_conversation_goes_on_first():
    """So that its time is compared with that of the same turn in stock."""

    def turns(*, is_reversed: bool) -> dict[str, list[int]]:
        load = Workload(draw(26001049, 250), 4000)
        asks = [ask for each in load.arrivals.values() for ask in each if ask.chain]
        load.arrivals.clear()
        for ask in reversed(asks) if is_reversed else asks:
            load.next_turn(ask, [97, 98], 1)
        return {ask.name: ask.prompt for each in load.arrivals.values() for ask in each}

    found = turns(is_reversed=False)
    assert len(found) > 1
    assert found == turns(is_reversed=True)
