"""With ``policy: noop`` the patched scheduler decides exactly as stock does.

Two real schedulers with real KV managers get the same random arrivals, aborts, prefix-cache
resets and tokens; each step's output is compared field by field.
"""

import random
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, Job, engine_config, make_prompt
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.engine.upstream import is_release

ARRIVE, ABORT, RESET, STEP = "arrive", "abort", "reset", "step"
# A pool of 24 blocks under prompts of up to 150 tokens and outputs of up to 400 preempts often.
BLOCKS = 24
MIN_STEPS = 2000

operation = st.one_of(
    st.tuples(st.just(ARRIVE), st.integers(0, 10_000)),
    st.tuples(st.just(ABORT), st.integers(0, 10_000)),
    st.tuples(st.just(RESET), st.booleans()),
    *[st.tuples(st.just(STEP), st.integers(5, 60))] * 4,
)


def random_job(number: int, seed: int) -> Job:
    rng = random.Random(seed)
    thinks = rng.random() < 0.7
    return Job(
        request_id=f"r{number}",
        prompt=tuple(
            make_prompt(rng, rng.randrange(4, 150), thinks=thinks, shared=rng.randrange(3))
        ),
        think_tokens=rng.randrange(300) if thinks else None,
        answer_tokens=rng.randrange(100),
        priority=rng.randrange(2),
        arrival_time=float(number),
    )


def comparable(value):
    """Scheduler outputs as plain data, without objects that compare by identity."""
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    if isinstance(value, dict):
        # The order of num_scheduled_tokens is the order of the batch: it counts.
        return [(key, comparable(item)) for key, item in value.items()]
    if hasattr(value, "__dataclass_fields__"):
        return {
            field.name: comparable(getattr(value, field.name))
            for field in fields(value)
            if field.name != "sampling_params"
        }
    return value


def run(driver: Driver, operations, record) -> None:
    arrived = 0
    for name, argument in operations:
        if name == ARRIVE:
            driver.add(random_job(arrived, argument))
            arrived += 1
        elif name == ABORT and arrived:
            driver.abort(f"r{argument % arrived}")
        elif name == RESET:
            driver.scheduler.reset_prefix_cache(reset_running_requests=argument)
        elif name == STEP:
            for _ in range(argument):
                record(comparable(driver.step()))
    while driver.scheduler.has_unfinished_requests():
        record(comparable(driver.step()))


CASES = [
    pytest.param(is_async, queue_policy, is_switched, id=f"{flow}-{queue_policy}-{how}")
    for is_async, flow in ((False, "sync"), (True, "async"))
    for queue_policy in ("fcfs", "priority")
    for is_switched, how in ((False, "configured"), (True, "switched"))
    if is_async or not is_switched
]


@pytest.mark.parametrize(("is_async", "queue_policy", "is_switched"), CASES)
def test_same_outputs_as_stock(monkeypatch, demo_model, is_async, queue_policy, is_switched):
    """Every field of every SchedulerOutput is the same over at least 2 000 random steps.

    Whether the policy is configured, or switched while the engine runs; KV tiers are not switched.
    """
    if is_switched:
        monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__TIERS", "false")
    else:
        monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    config = engine_config(
        demo_model, is_async=is_async, blocks=BLOCKS, scheduling_policy=queue_policy
    )
    stock_class = AsyncScheduler if is_async else Scheduler
    build = build_async_phase_scheduler if is_async else build_phase_scheduler
    patched_class = build(stock_class)
    steps = preemptions = 0

    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(operation, min_size=20, max_size=60))
    def compare(operations):
        nonlocal steps, preemptions
        stock_outputs, patched_outputs = [], []
        run(Driver.build(stock_class, config, is_async=is_async), operations, stock_outputs.append)
        patched = Driver.build(patched_class, config, is_async=is_async, tiered=True)
        if is_switched:
            patched.scheduler.live_switch.turn("noop", None)
        run(patched, operations, patched_outputs.append)
        assert patched_outputs == stock_outputs
        assert len(patched.scheduler.phase_tracker) == 0
        steps += len(stock_outputs)
        totals = patched.scheduler.phase_counters.totals
        preemptions += sum(n for event, n in totals.items() if event.startswith("preemption"))

    compare()
    assert steps >= MIN_STEPS
    assert preemptions > 20, "the comparison must cover preemptions"


@pytest.mark.skipif(not is_release("0.33"), reason="vLLM has this cadence from 0.33 on")
def test_a_prompt_that_is_preempted_in_its_step_restarts_the_cadence_as_in_stock(
    monkeypatch, demo_model
):
    """A decode of higher priority takes the blocks of a prompt that the step has already."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__MODE", "off")
    config = engine_config(
        demo_model,
        is_async=False,
        blocks=BLOCKS,
        scheduling_policy="priority",
        prefill_schedule_interval=4,
        long_prefill_token_threshold=64,
    )
    preempted = 0
    for length in range(4, 24):
        drivers = [
            Driver.build(cls, config, is_async=False)
            for cls in (Scheduler, build_phase_scheduler(Scheduler))
        ]
        for driver in drivers:
            driver.add(whole_job("prompt", 640, priority=1))
            driver.step()
            for number in range(2):
                driver.add(whole_job(f"decode{number}", length + 7 * number, priority=0))
        for _ in range(60):
            before = drivers[0].scheduler.last_prefill_step
            outputs = [comparable(driver.step()) for driver in drivers]
            lasts = [driver.scheduler.last_prefill_step for driver in drivers]
            assert outputs[0] == outputs[1]
            assert lasts[0] == lasts[1]
            victim = drivers[1].scheduler.requests["prompt"]
            is_victim = victim.status == RequestStatus.PREEMPTED
            preempted += is_victim and lasts[0] != before
    assert preempted


def whole_job(name, length, *, priority):
    prompt = make_prompt(random.Random(length), length, thinks=True, shared=length)
    return Job(name, tuple(prompt), 300, 50, priority=priority, arrival_time=float(length % 7))
