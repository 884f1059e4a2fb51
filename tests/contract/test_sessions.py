"""Streaming sessions on the real scheduler: a turn's end is an end, and a chunk is a prompt."""

import json

import pytest
from exit_driver import exit_driver, is_empty
from scheduler_driver import THINK_END, THINK_START, TURN_END, WORD, Job
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import output_processor
from vllm.v1.request import Request, RequestStatus

from meridian_patch.config.request_options import NO_OPTIONS
from meridian_patch.engine import wire
from meridian_patch.patching.candidate import MARK
from meridian_patch.phase.tracker import Phase

OBSERVED = {"EXIT__MODE": "observe"}
PROMPT = (*[WORD] * 20, THINK_START)
# The client's next words close the thought that the turn before left open.
CHUNK = (*[WORD] * 24, THINK_END, *[WORD] * 15)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def driver(request, monkeypatch, demo_model):
    return exit_driver(monkeypatch, demo_model, is_async=request.param, **OBSERVED)


def send(driver, job, max_tokens, extra_args=None, priority=0):
    """One chunk of a session; the first one opens it. All turns say what the newest job says."""
    driver.jobs[job.request_id] = job
    driver.deliveries.setdefault(job.request_id, [])
    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra_args)
    parameters.update_from_generation_config({}, TURN_END)
    driver.scheduler.add_request(
        Request(
            request_id=job.request_id,
            prompt_token_ids=list(job.prompt),
            sampling_params=parameters,
            pooling_params=None,
            priority=priority,
            resumable=True,
            block_hasher=get_request_block_hasher(driver.hash_block_size, sha256),
        )
    )


def step_until(driver, condition):
    for _ in range(200):
        if condition():
            return
        driver.step()
    raise AssertionError("it never came to that")


def test_a_queued_chunk_is_no_thought(driver):
    """The first turn ends in its hand-off, while the next chunk already waits."""
    scheduler = driver.scheduler
    send(driver, Job("s", PROMPT, 8, 5), max_tokens=50)
    send(driver, Job("s", (*[WORD] * 24, THINK_START), 8, 5), max_tokens=50)
    session = scheduler.requests["s"]
    step_until(driver, lambda: session.num_prompt_tokens > len(PROMPT))
    state = scheduler.phase_tracker.get("s")
    assert state.phase is Phase.PREFILL
    assert (state.tokens_in_phase, state.think_tokens) == (0, 0)
    step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    # Each thought has its boundary.
    totals = scheduler.phase_counters.totals
    assert totals["exit:natural"] == 2
    assert totals["think_tokens:natural"] == 2 * (8 + 1)
    assert scheduler.phase_tracker.get("s").think_tokens == 8 + 1
    scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    driver.drain()
    assert is_empty(driver)


def test_a_chunk_does_not_lengthen_the_thought_before_it(monkeypatch, demo_model, tmp_path):
    """The first turn ends within its thought; the chunk's tokens are no part of it."""
    trace = tmp_path / "trace.jsonl"
    driver = exit_driver(monkeypatch, demo_model, **OBSERVED, EXIT__TRACE=str(trace))
    send(driver, Job("s", PROMPT, 100, 5), max_tokens=10)
    send(driver, Job("s", CHUNK, 100, 5), max_tokens=20)
    session = driver.scheduler.requests["s"]
    step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    ends = [each for each in map(json.loads, trace.read_text().splitlines()) if "reason" in each]
    assert [(each["reason"], each["think_tokens"]) for each in ends] == [(None, 10)]


def test_a_paused_session_reads_nothing(driver):
    """Its answer is over. A reader who is not there would keep every prompt's chunks small."""
    scheduler = driver.scheduler
    send(driver, Job("s", PROMPT, 5, 5), max_tokens=50)
    session = scheduler.requests["s"]
    step_until(driver, lambda: scheduler.request_states.answering)
    step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    assert not scheduler.request_states.answering
    assert not scheduler.early_exit.requests
    # It reads again when its next turn answers.
    send(driver, Job("s", (*[WORD] * 30, WORD), None, 5), max_tokens=50)
    step_until(driver, lambda: scheduler.phase_tracker.get("s").phase is Phase.ANSWER)
    assert len(scheduler.request_states.answering) == 1
    scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    assert not scheduler.request_states.answering
    driver.drain()
    assert is_empty(driver)


def test_a_session_that_is_preempted_and_ends_its_turn_waits_for_no_answer(monkeypatch, demo_model):
    """Its last tokens were on the way: probes must not be held back for it."""
    driver = exit_driver(monkeypatch, demo_model, is_async=True, **OBSERVED)
    scheduler = driver.scheduler
    send(driver, Job("s", PROMPT, 5, 5), max_tokens=50)
    session = scheduler.requests["s"]
    last = len(PROMPT) + 5 + 1 + 5 + 1
    step_until(driver, lambda: session.num_computed_tokens == last - 1)
    assert session.num_in_flight_tokens
    scheduler.running.remove(session)
    scheduler._preempt_request(session, 0.0)
    assert scheduler.request_states.waiting_answers
    step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    assert not scheduler.request_states.waiting_answers


@pytest.mark.parametrize("is_queued", [False, True], ids=["later", "queued"])
def test_a_session_that_is_preempted_as_its_turn_ends_goes_on(monkeypatch, demo_model, is_queued):
    """vLLM itself drops it from all queues, and its next turn would lack what it said before."""
    driver = exit_driver(monkeypatch, demo_model, is_async=True, **OBSERVED)
    scheduler = driver.scheduler
    send(driver, Job("s", PROMPT, 5, 5), max_tokens=50)
    if is_queued:
        send(driver, Job("s", CHUNK, 5, 5), max_tokens=50)
    session = scheduler.requests["s"]
    said = 5 + 1 + 5 + 1
    step_until(driver, lambda: session.num_computed_tokens == len(PROMPT) + said - 1)
    assert session.num_in_flight_tokens
    scheduler.running.remove(session)
    scheduler._preempt_request(session, 0.0)
    if not is_queued:
        step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
        send(driver, Job("s", CHUNK, 5, 5), max_tokens=50)
    step_until(driver, lambda: session.max_tokens and session.num_prompt_tokens > len(PROMPT))
    # All that was said but the last token, which vLLM drops, is part of the next prompt.
    assert session.num_prompt_tokens == len(PROMPT) + said - 1 + len(CHUNK)
    assert list(session.prompt_token_ids) == list(
        session._all_token_ids[: session.num_prompt_tokens]
    )
    step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    assert session.num_output_tokens
    scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    driver.drain()
    assert is_empty(driver)


def test_a_chunk_brings_its_own_options(driver):
    """Each chunk has parameters of its own, and vLLM goes by the newest."""
    scheduler = driver.scheduler
    send(driver, Job("s", PROMPT, 5, 5), 50, {"meridian_itl_ms": 500.0})
    session = scheduler.requests["s"]
    step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    assert scheduler.request_states.get("s").options.itl_s == 0.5
    send(driver, Job("s", PROMPT, 5, 5), 50, {"meridian_itl_ms": 250.0})
    assert scheduler.request_states.get("s").options.itl_s == 0.25
    step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    send(driver, Job("s", PROMPT, 5, 5), 50)
    assert scheduler.request_states.get("s").options is NO_OPTIONS


def test_a_chunk_does_not_ask_for_what_the_one_before_asked_for(driver):
    """Its priority is its own."""
    scheduler = driver.scheduler
    send(driver, Job("s", PROMPT, 5, 5), 50, {"meridian_priority": -3})
    session = scheduler.requests["s"]
    assert session.priority == -3
    step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    send(driver, Job("s", PROMPT, 5, 5), 50)
    assert session.priority == 0


def test_under_vllms_priority_policy_a_wish_ends_with_its_chunk(monkeypatch, demo_model):
    """The session has the priority again that its client opened it with."""
    driver = exit_driver(monkeypatch, demo_model, engine_args={"scheduling_policy": "priority"})
    scheduler = driver.scheduler
    send(driver, Job("s", PROMPT, 5, 5), 50, {"meridian_priority": -3}, priority=7)
    session, seen = scheduler.requests["s"], []
    for wish in (-2, None, None):
        seen.append(session.priority)
        step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
        send(driver, Job("s", PROMPT, 5, 5), 50, wish and {"meridian_priority": wish}, priority=7)
    assert [*seen, session.priority] == [-3, -2, 7, 7]
    scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    driver.drain()
    assert is_empty(driver)


@pytest.mark.parametrize("is_queued", [False, True], ids=["paused", "queued"])
def test_the_end_of_a_turn_is_told(driver, monkeypatch, is_queued):
    """Also where the next chunk waits already, and takes the turn's place in the same step."""
    monkeypatch.setattr(output_processor.RequestState, MARK, "state", raising=False)
    scheduler, told = driver.scheduler, []
    update = scheduler.update_from_output

    def watched(*args):
        result = update(*args)
        ends = [each for batch in result.values() for each in batch.outputs if each.finish_reason]
        told.extend((each.kv_transfer_params or {}).get(wire.SUMMARY) for each in ends)
        return result

    monkeypatch.setattr(scheduler, "update_from_output", watched)
    asked = {"meridian_exit": "enforce", "meridian_min_think_tokens": 50}
    for _ in range(1 + is_queued):
        send(driver, Job("s", PROMPT, 100, 5), 10, asked)
    session = scheduler.requests["s"]
    step_until(driver, lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    assert [each and each["not_enforced"]["eat"] for each in told] == ["floor"] * (1 + is_queued)
