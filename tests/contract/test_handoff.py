"""On vLLM's scheduler with its NIXL connector: what leaves an engine, and what it may take over."""

import asyncio
import functools
import time
from collections import defaultdict

import pytest
from exit_driver import EAGER
from handoff_runs import LOAD_FAILURE
from scheduler_driver import (
    BLOCK_SIZE,
    THINK_END,
    TURN_END,
    WORD,
    Driver,
    Job,
    engine_config,
)
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched import scheduler as upstream
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker import worker_base

from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.engine.handoff.layout import layout_of
from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.engine.wire import FACTS, RELEASE
from meridian_patch.errors import ConfigError
from meridian_patch.handoff.stays import why_it_stays
from meridian_patch.handoff.ticket import OFFER, facts_in
from meridian_patch.patching.candidate import MARK
from meridian_patch.serve_roles import FABRICS

PROMPT = tuple([WORD] * 49 + [256])
CALL_IDS = tuple(build_tokenizer().encode("<call>", add_special_tokens=False))
OFFERED = {"kv_transfer_params": dict(OFFER)}


def is_moving(part):
    return any(state.move for state in part._states)


@pytest.fixture(params=(False, True), ids=("sync", "async"))
def is_async(request) -> bool:
    return request.param


@pytest.fixture
def role(monkeypatch, request) -> str:
    name = getattr(request, "param", "think")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__ROLE", name)
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__OFFLOAD_THRESHOLD_BLOCKS", "3")
    return name


@pytest.fixture
def driver(demo_model, is_async, role):
    return driver_of(demo_model, is_async)


@functools.cache
def config_of(model, *, is_async: bool, blocks: int, connector: str | None):
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", engine_id="one")
    transfer.kv_load_failure_policy = "recompute"
    return engine_config.__wrapped__(
        model,
        is_async=is_async,
        blocks=blocks,
        kv_transfer_config=transfer if connector else None,
        max_num_seqs=8,
    )


def driver_of(demo_model, is_async, *, blocks=200, connector="NixlConnector") -> Driver:
    """A driver with each request's last output, `ended`, and all that its client got, `said`."""
    config = config_of(demo_model, is_async=is_async, blocks=blocks, connector=connector)
    build = build_async_phase_scheduler if is_async else build_phase_scheduler
    scheduler_class = build(AsyncScheduler if is_async else Scheduler)
    driver = Driver.build(scheduler_class, config, is_async=is_async)
    driver.ended, driver.said = watch_outputs(driver.scheduler)
    return driver


def watch_outputs(scheduler) -> tuple[dict, dict[str, list[int]]]:
    """By request its last output and its tokens, as the API server gets them."""
    ended, said = {}, defaultdict(list)
    update = scheduler.update_from_output

    def watched(*args, **kwargs):
        results = update(*args, **kwargs)
        for output in (each for client in results.values() for each in client.outputs):
            said[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                ended[output.request_id] = output
        return results

    scheduler.update_from_output = watched
    return ended, said


def num_free(driver) -> int:
    return driver.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def test_a_thought_leaves_with_all_of_its_tokens_and_blocks(driver):
    """The token after the boundary is generated, because its step computes the boundary's KV."""
    free_before = num_free(driver)
    driver.add(Job("r", PROMPT, think_tokens=45, answer_tokens=30), OFFERED)
    driver.drain()
    output = driver.ended["r"]
    ticket = output.kv_transfer_params
    assert output.finish_reason == FinishReason.LENGTH
    assert output.new_token_ids == []
    # 45 tokens and the boundary reach the client; the one after it does not.
    assert driver.said["r"] == [*[WORD] * 45, THINK_END]
    assert ticket["do_remote_prefill"] is True
    assert ticket["remote_num_tokens"] == 96
    # Exactly the blocks of these tokens: the other side reads the last ones it is told of.
    (blocks,) = ticket["remote_block_ids"]
    assert len(blocks) == 96 // BLOCK_SIZE == 3
    facts = facts_in(ticket)
    assert (facts.num_prompt_tokens, facts.num_output_tokens) == (50, 46)
    assert facts.max_tokens_left == 1500 - 46
    assert facts.layout.block_size == BLOCK_SIZE
    # The blocks stay until the other engine has read them.
    assert num_free(driver) < free_before
    driver.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_sending={"r"}))
    assert num_free(driver) == free_before


def test_blocks_that_no_engine_will_read_are_free_at_once(driver):
    """As upstream's worker frees them: when the newest end of their lease is past."""
    driver.add(Job("r", PROMPT, think_tokens=45, answer_tokens=30), OFFERED)
    driver.drain()
    rest = (*PROMPT, *driver.said["r"])
    for name, released in (("again", "r"), ("unknown", "x"), ("odd", 7)):
        driver.add(Job(name, rest, None, 5), {"kv_transfer_params": {RELEASE: released}})
    before_s = time.perf_counter()
    ends = driver.step().kv_connector_metadata.reqs_to_send
    assert set(ends) == {"r"}
    assert ends["r"] <= before_s
    driver.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_sending={"r"}))
    driver.drain()
    assert {driver.ended[name].finish_reason for name in ("again", "unknown", "odd")} == {
        FinishReason.STOP
    }


@pytest.mark.parametrize(
    ("job", "args"),
    (
        (Job("r", PROMPT, think_tokens=10, answer_tokens=30), OFFERED),
        (Job("r", PROMPT, think_tokens=60, answer_tokens=0), OFFERED),
        (Job("r", PROMPT, think_tokens=60, answer_tokens=30, max_tokens=62), OFFERED),
        (Job("r", PROMPT, think_tokens=60, answer_tokens=30, max_tokens=40), OFFERED),
        (Job("r", (*PROMPT[:-1], WORD), think_tokens=None, answer_tokens=80), OFFERED),
        (Job("r", PROMPT, think_tokens=60, answer_tokens=30), None),
        (Job("r", PROMPT, 60, answer_tokens=30, opening=CALL_IDS, is_closed=False), OFFERED),
    ),
    ids=(
        "below the threshold",
        "without an answer",
        "of one answer token",
        "that never ends",
        "without a thought",
        "that was not offered",
        "that a tool call ends",
    ),
)
def test_a_thought_stays_that(demo_model, is_async, role, use_family, job, args):
    """And the connector keeps no block for a reader that will not come."""
    use_family(implicit_end=["<call>"])
    driver = driver_of(demo_model, is_async)
    free_before = num_free(driver)
    driver.add(job, args)
    driver.drain()
    output = driver.ended["r"]
    assert FACTS not in (output.kv_transfer_params or {})
    wanted = (
        (0 if job.think_tokens is None else job.think_tokens + job.is_closed)
        + job.answer_tokens
        + 1
    )
    assert len(driver.deliveries["r"]) == min(job.max_tokens, wanted)
    assert num_free(driver) == free_before


@pytest.mark.parametrize(
    "sampling",
    (
        {"seed": 3, "temperature": 1.0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"prompt_logprobs": 1},
    ),
    ids=str,
)
def test_a_request_whose_sampling_does_not_travel_stays(sampling):
    parameters = SamplingParams(**{"temperature": 0, **sampling})
    request = Request("r", list(PROMPT), parameters, None)
    assert why_it_stays(request)
    assert not why_it_stays(Request("r", list(PROMPT), SamplingParams(temperature=1.0), None))


def test_an_abort_within_a_thought_leaves_nothing(driver):
    free_before = num_free(driver)
    driver.add(Job("r", PROMPT, think_tokens=60, answer_tokens=30), OFFERED)
    for _ in range(30):
        driver.step()
    driver.abort("r")
    driver.drain()
    assert num_free(driver) == free_before


def test_under_pressure_each_ticket_has_its_own_tokens(demo_model, is_async, role):
    """Preempted requests are computed again before they leave."""
    driver = driver_of(demo_model, is_async, blocks=24)
    for number in range(24):
        job = Job(f"r{number}", PROMPT, think_tokens=60 + number, answer_tokens=20)
        driver.add(job, OFFERED)
    preempted = 0
    for _ in range(3000):
        preempted += len(driver.step().preempted_req_ids or ())
        sent = {name for name in driver.ended if name in driver.scheduler.requests}
        driver.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_sending=sent))
        if len(driver.ended) == 24:
            break
    assert preempted
    for number in range(24):
        ticket = driver.ended[f"r{number}"].kv_transfer_params
        assert driver.said[f"r{number}"] == [*[WORD] * (60 + number), THINK_END]
        (blocks,) = ticket["remote_block_ids"]
        assert len(blocks) == -(-(50 + 61 + number) // BLOCK_SIZE)


def test_without_a_connector_the_role_is_refused(demo_model, is_async, role):
    with pytest.raises(ConfigError, match=r"handoff.role is 'think'.*meridian serve --role think"):
        driver_of(demo_model, is_async, connector=None)


def add_from_another_engine(driver, layout) -> None:
    """Request r, whose KV cache another engine has."""
    facts = {
        "num_prompt_tokens": 20,
        "num_output_tokens": 30,
        "max_tokens_left": 9,
        "layout": layout,
        "adapter": None,
    }
    params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "two",
        "remote_request_id": "r",
        "remote_host": "localhost",
        "remote_port": 1,
        "tp_size": 1,
        FACTS: facts,
    }
    driver.add(
        Job("r", (*PROMPT[:-1], WORD), think_tokens=None, answer_tokens=5),
        {"kv_transfer_params": params},
    )


@pytest.mark.parametrize("role", ("answer",), indirect=True)
@pytest.mark.parametrize("is_fitting", (True, False), ids=("fits", "other block size"))
def test_an_answer_engine_takes_only_what_fits(driver, is_fitting):
    """Another layout is computed here: reading it would serve wrong tokens."""
    layout = layout_of(driver.scheduler.vllm_config).model_dump()
    layout |= {} if is_fitting else {"block_size": 16}
    add_from_another_engine(driver, layout)
    driver.step()
    request = driver.scheduler.requests["r"]
    assert (request.kv_transfer_params is not None) == is_fitting
    is_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert is_loading == is_fitting
    totals = driver.scheduler.phase_counters.totals
    tickets = {name: number for name, number in totals.items() if name.startswith("ticket:")}
    assert tickets == {"ticket:accepted" if is_fitting else "ticket:refused": 1}


@pytest.mark.parametrize("role", ("answer",), indirect=True)
def test_a_kv_cache_that_does_not_arrive_is_logged(driver, monkeypatch):
    """Tests on engines look for it: such a request is computed again, and counts as a hit."""
    add_from_another_engine(driver, layout_of(driver.scheduler.vllm_config).model_dump())
    driver.step()
    assert driver.scheduler.requests["r"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    told = []
    monkeypatch.setattr(upstream.logger, "warning", lambda text, *_: told.append(text))
    (blocks,) = driver.scheduler.kv_cache_manager.get_block_ids("r")
    driver.scheduler._handle_invalid_blocks(set(blocks), {})
    assert LOAD_FAILURE in told[0]


def test_a_thought_that_is_closed_early_leaves_too(demo_model, is_async, role, monkeypatch):
    """Its probes are no requests to the connector."""
    for name, value in EAGER.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_{name}", value)
    monkeypatch.setattr(worker_base.WorkerBase, MARK, "worker", raising=False)
    driver = driver_of(demo_model, is_async)
    connector, named = driver.scheduler.connector, set()
    build = connector.build_connector_meta

    def watched(output):
        meta = build(output)
        for part in (meta.reqs_to_recv, meta.reqs_to_save, meta.reqs_to_send, meta.reqs_in_batch):
            named.update(part)
        named.update(meta.reqs_not_processed)
        return meta

    connector.build_connector_meta = watched
    probed = set()
    for number in range(3):
        driver.add(Job(f"r{number}", PROMPT, think_tokens=900, answer_tokens=20), OFFERED)
    while len(driver.ended) < 3:
        probed |= set(driver.step().num_scheduled_tokens) - {"r0", "r1", "r2"}
    assert probed
    assert named == {"r0", "r1", "r2"}
    for name, output in driver.ended.items():
        assert FACTS in output.kv_transfer_params
        assert THINK_END in driver.said[name]
        assert len(driver.said[name]) < 850


def test_without_its_part_requests_end_as_in_stock(driver):
    """The circuit breaker switched it off between the boundary and the next token."""
    part = driver.scheduler._think_part
    driver.add(Job("r", PROMPT, think_tokens=60, answer_tokens=30), OFFERED)
    while not is_moving(part):
        driver.step()
    driver.scheduler._switch_off([part.name])
    driver.drain()
    assert len(driver.deliveries["r"]) == 92
    assert FACTS not in (driver.ended["r"].kv_transfer_params or {})


def test_mooncake_is_told_what_it_needs(demo_model, is_async, role):
    """Its connector leaves the naming of transfers and engines to the caller."""
    driver = driver_of(demo_model, is_async, connector="MooncakeConnector")
    driver.add(Job("r", PROMPT, think_tokens=45, answer_tokens=30), OFFERED)
    driver.drain()
    ticket = driver.ended["r"].kv_transfer_params
    assert ticket["transfer_id"] == "r"
    assert ticket["remote_engine_id"] == "one"
    assert ticket["remote_bootstrap_addr"].startswith("http://")
    assert ticket["do_remote_prefill"] is True
    assert len(driver.said["r"]) == 46
    side = driver.scheduler.connector.connector_scheduler
    (blocks,) = side._reqs_need_send["r"][1]
    assert len(blocks) == 3


def test_mooncake_frees_what_nobody_fetches(monkeypatch):
    """After the time that `meridian serve` sets: an answer engine may be lost."""
    (variable,) = FABRICS["mooncake"].settings
    monkeypatch.setenv(variable, "0")
    worker = object.__new__(mooncake_connector.MooncakeConnectorWorker)
    worker.reqs_need_send, worker.finished_sending_reqs = {}, set()
    worker.xfer_stats = mooncake_connector.MooncakeKVConnectorStats()
    # It was not built, so it cannot be torn down.
    monkeypatch.setattr(mooncake_connector.MooncakeConnectorWorker, "shutdown", lambda _: None)
    for blocks in ([], [[1, 2]]):
        meta = mooncake_connector.MooncakeConnectorMetadata()
        meta.reqs_to_send["r"] = ("name of the transfer", blocks)
        asyncio.run(worker.record_send_reqs(meta))
    time.sleep(0.001)
    assert asyncio.run(worker.fetch_finished_sending_reqs()) == {"r"}
    assert not worker.reqs_need_send


@pytest.mark.parametrize("role", ("think", "answer"), indirect=True)
@pytest.mark.parametrize("value", ("x", 5, ["a"]), ids=repr)
def test_parameters_that_are_no_mapping_reach_no_connector(driver, value):
    """A request may set anything in `vllm_xargs`; NIXL would raise in EngineCore."""
    driver.add(Job("r", PROMPT, think_tokens=45, answer_tokens=30), {"kv_transfer_params": value})
    driver.drain()
    assert len(driver.deliveries["r"]) == 77


@pytest.mark.parametrize("role", ("answer",), indirect=True)
def test_an_answer_engine_keeps_nothing_for_readers(driver):
    free_before = num_free(driver)
    driver.add(Job("r", PROMPT, think_tokens=45, answer_tokens=30), OFFERED)
    driver.drain()
    assert num_free(driver) == free_before
    assert len(driver.deliveries["r"]) == 77


@pytest.mark.parametrize("role", ("answer",), indirect=True)
def test_an_answer_engine_must_compute_what_does_not_arrive(demo_model, is_async, role):
    config = config_of(demo_model, is_async=is_async, blocks=200, connector="NixlConnector")
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    try:
        with pytest.raises(ConfigError, match=r"kv_load_failure_policy.*expected 'recompute'"):
            driver_of(demo_model, is_async)
    finally:
        config.kv_transfer_config.kv_load_failure_policy = "recompute"


def drafted(driver, *drafts: int) -> list[int]:
    """Let these tokens be accepted with the boundary; the list of all that the client gets."""
    request, told = driver.scheduler.requests["r"], []
    deliver, update = (
        driver.scheduler._update_request_with_output,
        driver.scheduler.update_from_output,
    )
    left = [*drafts]

    def with_drafts(of, token_ids, *args, **kwargs):
        if THINK_END in token_ids and left:
            token_ids = [*token_ids, *left]
            request.num_computed_tokens += len(left)
            left.clear()
        return deliver(of, token_ids, *args, **kwargs)

    def watched(*args, **kwargs):
        results = update(*args, **kwargs)
        for client in results.values():
            told.extend(token for output in client.outputs for token in output.new_token_ids)
        return results

    driver.scheduler._update_request_with_output = with_drafts
    driver.scheduler.update_from_output = watched
    return told


def test_drafts_behind_the_boundary_are_taken_back(demo_model, role):
    """The answer engine samples them again, from its own grammar's and parser's beginning."""
    driver = driver_of(demo_model, False)
    driver.add(Job("r", PROMPT, think_tokens=60, answer_tokens=30), OFFERED)
    told = drafted(driver, WORD, WORD)
    driver.drain()
    assert not is_moving(driver.scheduler._think_part)
    assert told == [*[WORD] * 60, THINK_END]
    output = driver.ended["r"]
    assert output.kv_transfer_params["remote_num_tokens"] == 111


def test_drafts_come_back_if_the_next_token_ends_the_request(demo_model, role):
    """The whole answer was drafted: the request ends where it thought."""
    driver = driver_of(demo_model, False)
    driver.add(Job("r", PROMPT, think_tokens=60, answer_tokens=2, opening=(70, 71)), OFFERED)
    told = drafted(driver, 70, 71)
    driver.drain()
    assert told == [*[WORD] * 60, THINK_END, 70, 71, TURN_END]
    output = driver.ended["r"]
    assert output.finish_reason == FinishReason.STOP
    assert FACTS not in (output.kv_transfer_params or {})


def test_drafts_come_back_if_the_part_is_switched_off(demo_model, role):
    driver = driver_of(demo_model, False)
    driver.add(Job("r", PROMPT, think_tokens=60, answer_tokens=9, opening=(70, 71)), OFFERED)
    told, part = drafted(driver, 70, 71), driver.scheduler._think_part
    while not is_moving(part):
        driver.step()
    assert told[-1] == THINK_END
    driver.scheduler._switch_off([part.name])
    driver.drain()
    assert told == [*[WORD] * 60, THINK_END, 70, 71, *[WORD] * 7, TURN_END]


@pytest.mark.parametrize("is_off", (False, True), ids=("on", "switched off"))
def test_drafts_of_an_aborted_request_are_nobodys(demo_model, role, is_off):
    """Another request may have its name."""
    driver = driver_of(demo_model, False)
    driver.add(Job("r", PROMPT, think_tokens=60, answer_tokens=9, opening=(70, 71)), OFFERED)
    told, part = drafted(driver, 70, 71), driver.scheduler._think_part
    while not is_moving(part):
        driver.step()
    if is_off:
        driver.scheduler._switch_off([part.name])
    driver.abort("r")
    told.clear()
    driver.add(Job("r", PROMPT, think_tokens=None, answer_tokens=3))
    driver.drain()
    assert told == [WORD] * 3 + [TURN_END]


def test_a_request_whose_blocks_the_connector_did_not_keep_leaves_too(driver):
    """Its last token is discarded already, so its client would lose the answer."""
    connector = driver.scheduler.connector
    connector.request_finished_all_groups = lambda *_: (False, None)
    driver.add(Job("r", PROMPT, think_tokens=60, answer_tokens=30), OFFERED)
    driver.drain()
    ticket = driver.ended["r"].kv_transfer_params
    assert driver.said["r"] == [*[WORD] * 60, THINK_END]
    assert facts_in(ticket).num_output_tokens == 61
    assert "do_remote_prefill" not in ticket
