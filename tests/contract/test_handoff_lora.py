"""A KV cache of another LoRA adapter is computed again, on vLLM's scheduler with its connector."""

import functools
import json
import logging
import os
from types import SimpleNamespace

import pytest
from scheduler_driver import BLOCK_SIZE, THINK_END, WORD, Driver, Job, engine_config
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from meridian_patch.engine.handoff import lora_weights
from meridian_patch.engine.handoff.lora_weights import AdapterWeights
from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.engine.wire import FACTS
from meridian_patch.handoff.ticket import NOT_KNOWN, OFFER, facts_in

PROMPT = tuple([WORD] * 49 + [256])
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ONE, OTHER = b"weights of one", b"weights, others"


def adapter_in(folder, weights=ONE, config=None, file=WEIGHTS):
    """Write what the scheduler knows of an adapter: two files. Their content is not loaded here."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config or {"r": 8}))
    (folder / file).write_bytes(weights)
    return LoRARequest("poet", 1, str(folder))


@functools.cache
def config_of(model, role, *, is_async):
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", engine_id=role)
    transfer.kv_load_failure_policy = "recompute"
    return engine_config.__wrapped__(
        model,
        is_async=is_async,
        blocks=200,
        kv_transfer_config=transfer,
        max_num_seqs=8,
        enable_lora=True,
        max_loras=4,
        max_lora_rank=8,
    )


class Engine:
    """A think or an answer engine without a model."""

    def __init__(self, model, role, *, is_async):
        build = build_async_phase_scheduler if is_async else build_phase_scheduler
        scheduler_class = build(AsyncScheduler if is_async else Scheduler)
        config = config_of(model, role, is_async=is_async)
        self.driver = Driver.build(scheduler_class, config, is_async=is_async)
        self.ended = {}
        self.scheduler = self.driver.scheduler
        self._update = self.scheduler.update_from_output
        self.scheduler.update_from_output = self._watched

    def add(self, job, adapter=None, params=None, *, is_session=False):
        extra = None if params is None else {"kv_transfer_params": params}
        request = self.driver._request_of(job, extra_args=extra, resumable=is_session)
        request.lora_request = adapter
        self.driver.jobs[job.request_id] = job
        self.driver.deliveries[job.request_id] = []
        self.scheduler.add_request(request)
        return request

    def num_free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _watched(self, *args, **kwargs):
        results = self._update(*args, **kwargs)
        for client in results.values():
            for output in client.outputs:
                if output.finish_reason is not None:
                    self.ended[output.request_id] = output
        return results


@pytest.fixture(params=(False, True), ids=("sync", "async"))
def engine(request, demo_model, monkeypatch):
    """Builds engines by role."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__OFFLOAD_THRESHOLD_BLOCKS", "3")

    def build(role):
        monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__ROLE", role)
        return Engine(demo_model, role, is_async=request.param)

    return build


@pytest.fixture
def log(monkeypatch, caplog):
    """Our error records; vLLM's logger does not hand them on."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "vllm.meridian_patch" and record.levelno >= logging.ERROR
    ]


def ticket_of(think, adapter, name="r"):
    """Let a think engine serve a thought, and end with its ticket."""
    job = Job(name, PROMPT, think_tokens=45, answer_tokens=30)
    think.add(job, adapter, dict(OFFER))
    think.driver.drain()
    return think.ended[name].kv_transfer_params


def is_moved(answer, adapter, ticket, name="r"):
    """Whether an answer engine reads the KV cache, instead of computing all tokens."""
    job = Job(name, (*PROMPT, *[WORD] * 45, THINK_END), think_tokens=None, answer_tokens=5)
    request = answer.add(job, adapter, dict(ticket))
    answer.driver.step()
    is_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert (request.kv_transfer_params is not None) == is_loading
    if not is_loading:
        answer.driver.drain()
        assert len(answer.driver.deliveries[name]) == 6
    return is_loading


def test_the_same_weights_move(engine, tmp_path, log):
    """Wherever their files are."""
    think, answer = engine("think"), engine("answer")
    ticket = ticket_of(think, adapter_in(tmp_path / "one"))
    digest = facts_in(ticket).adapter
    assert len(digest) == 32
    assert int(digest, 16)
    assert ticket["do_remote_prefill"] is True
    assert is_moved(answer, adapter_in(tmp_path / "copy"), ticket)
    assert not log()


def test_other_weights_of_that_name_are_computed_again(engine, tmp_path, log):
    """For all requests with them, with one line that names the adapter."""
    think, answer = engine("think"), engine("answer")
    one, other = adapter_in(tmp_path / "one"), adapter_in(tmp_path / "other", OTHER)
    for name in ("r0", "r1"):
        assert not is_moved(answer, other, ticket_of(think, one, name), name)
    [line] = log()
    assert "requests are not handed off to this engine" in line
    assert "the digest of LoRA adapter 'poet' is" in line


def test_without_an_adapter_nothing_is_compared(engine, log):
    ticket = ticket_of(engine("think"), None)
    assert ticket[FACTS]["adapter"] is None
    assert is_moved(engine("answer"), None, ticket)
    assert not log()


def test_an_adapter_on_one_engine_alone_is_a_difference(engine, tmp_path, log):
    think, answer = engine("think"), engine("answer")
    poet = adapter_in(tmp_path / "poet")
    assert not is_moved(answer, poet, ticket_of(think, None, "r0"), "r0")
    assert not is_moved(answer, None, ticket_of(think, poet, "r1"), "r1")
    first, second = log()
    assert "the LoRA adapter is none there and 'poet' here" in first
    assert "the LoRA adapter is one of digest" in second
    assert "there and none here" in second


def test_what_the_think_engine_does_not_know_is_not_kept(engine, tmp_path, log):
    """Here a name of a hub, which no other engine may have at the same revision."""
    think, answer = engine("think"), engine("answer")
    free_before = think.num_free()
    hub = LoRARequest("poet", 1, "someone/poet-lora")
    ticket = ticket_of(think, hub)
    assert facts_in(ticket).adapter == NOT_KNOWN
    assert "do_remote_prefill" not in ticket
    assert think.num_free() == free_before
    # The same name is no proof.
    assert not is_moved(answer, hub, ticket)
    assert not is_moved(answer, None, ticket, "r1")
    path = adapter_in(tmp_path / "poet").lora_path
    assert not is_moved(answer, LoRARequest("poet", 2, path), ticket, "r2")
    there, here, none, unknown = log()
    assert "KV caches of this engine are computed again where they go" in there
    assert "LoRA adapter 'poet' are unknown: someone/poet-lora has none of" in there
    assert "LoRA adapter 'poet' are unknown here: someone/poet-lora has none of" in here
    assert "the LoRA adapter is unknown there and none here" in none
    assert "LoRA adapter 'poet' are unknown there" in unknown


def test_what_the_answer_engine_does_not_know_is_computed_again(engine, tmp_path, log):
    ticket = ticket_of(engine("think"), adapter_in(tmp_path / "poet"))
    answer = engine("answer")
    assert not is_moved(answer, LoRARequest("poet", 1, str(tmp_path / "gone")), ticket)
    [line] = log()
    assert "LoRA adapter 'poet' are unknown here" in line


@pytest.mark.parametrize("change", ("missing", "new"))
def test_a_ticket_of_another_version_is_computed_again(engine, log, change):
    """An older one does not say the adapter; a newer one may say what is not compared here."""
    ticket = ticket_of(engine("think"), None)
    if change == "missing":
        del ticket[FACTS]["adapter"]
    else:
        ticket[FACTS]["new"] = 1
    answer = engine("answer")
    assert not is_moved(answer, None, ticket, "r0")
    assert not is_moved(answer, None, ticket, "r1")
    [line] = log()
    wanted = {"missing": "the LoRA adapter is unknown there", "new": "meridian_handoff.new is 1"}
    assert wanted[change] in line


def test_each_request_of_a_batch_has_its_own_adapter(engine, tmp_path):
    """And one that is aborted leaves nothing."""
    think = engine("think")
    free_before = think.num_free()
    adapters = {
        "one": adapter_in(tmp_path / "one"),
        "other": LoRARequest("critic", 2, adapter_in(tmp_path / "other", OTHER).lora_path),
        "none": None,
        "again": adapter_in(tmp_path / "one"),
        "aborted": LoRARequest("third", 3, adapter_in(tmp_path / "third", b"3").lora_path),
    }
    for number, (name, adapter) in enumerate(adapters.items()):
        job = Job(name, PROMPT, think_tokens=45 + 7 * number, answer_tokens=30)
        think.add(job, adapter, dict(OFFER))
    for _ in range(20):
        think.driver.step()
    think.driver.abort("aborted")
    think.driver.drain()
    tickets = {name: output.kv_transfer_params for name, output in think.ended.items()}
    digests = {name: facts_in(ticket).adapter for name, ticket in tickets.items()}
    assert digests["one"] == digests["again"] != digests["other"]
    assert digests["none"] is None
    assert NOT_KNOWN not in digests.values()
    assert not len(think.scheduler.request_states)
    sent = KVConnectorOutput(finished_sending=set(tickets))
    think.scheduler._update_from_kv_xfer_finished(sent)
    assert think.num_free() == free_before
    assert not think.scheduler.phase_counters.totals.get("fallback:exception")


def test_a_session_with_an_adapter_stays_and_is_checked(engine, tmp_path):
    think, answer = engine("think"), engine("answer")
    poet, other = adapter_in(tmp_path / "poet"), adapter_in(tmp_path / "other", OTHER)
    job = Job("s", PROMPT, think_tokens=45, answer_tokens=30)
    think.add(job, poet, dict(OFFER), is_session=True)
    for _ in range(100):
        think.driver.step()
    assert not think.scheduler.request_states.get("s").is_offered
    assert len(think.driver.deliveries["s"]) == 77
    session = answer.add(job, other, dict(ticket_of(think, poet)), is_session=True)
    assert session.kv_transfer_params is None
    for _ in range(100):
        answer.driver.step()
    assert len(answer.driver.deliveries["s"]) == 77
    for each in (think, answer):
        assert not each.scheduler.phase_counters.totals.get("fallback:exception")


def test_files_that_change_within_a_thought_are_not_known(engine, tmp_path, log):
    think, poet = engine("think"), adapter_in(tmp_path / "poet")
    think.add(Job("r", PROMPT, think_tokens=45, answer_tokens=30), poet, dict(OFFER))
    for _ in range(20):
        think.driver.step()
    adapter_in(tmp_path / "poet", ONE[::-1])
    think.driver.drain()
    assert facts_in(think.ended["r"].kv_transfer_params).adapter == NOT_KNOWN
    # Workers and the prefix cache may still have the old weights when the old files are back.
    adapter_in(tmp_path / "poet")
    assert facts_in(ticket_of(think, poet, "next")).adapter == NOT_KNOWN
    [line] = log()
    assert "its files have changed; load changed weights from a new path" in line


def test_an_adapter_that_is_replaced_within_a_thought_is_not_known(engine, tmp_path, log):
    """Loaded in place from another path: the id stays, and the new one's requests move."""
    think, old = engine("think"), adapter_in(tmp_path / "old")
    think.add(Job("r", PROMPT, think_tokens=45, answer_tokens=30), old, dict(OFFER))
    for _ in range(20):
        think.driver.step()
    path = adapter_in(tmp_path / "new", OTHER).lora_path
    new = LoRARequest("poet", 1, path, load_inplace=True)
    next_ticket = ticket_of(think, new, "next")
    assert facts_in(think.ended["r"].kv_transfer_params).adapter == NOT_KNOWN
    assert is_moved(engine("answer"), adapter_in(tmp_path / "copy", OTHER), next_ticket)
    [line] = log()
    assert "vLLM has another adapter under its id" in line


def test_large_files_are_read_beside_the_steps(engine, tmp_path, monkeypatch, log):
    """Until they are read, requests are computed again."""
    think, answer = engine("think"), engine("answer")
    poet = adapter_in(tmp_path / "poet")
    ticket = ticket_of(think, poet)
    monkeypatch.setattr(lora_weights, "READ_AT_ONCE_BYTES", 0)
    adapters = answer.scheduler._parts._parts[-1]._adapters
    with adapters._turn:
        assert not is_moved(answer, poet, ticket, "r0")
    loaded = adapters.begin(poet)
    wait_for(adapters, loaded)
    assert adapters.of(poet, loaded).digest == facts_in(ticket).adapter
    assert is_moved(answer, poet, ticket, "r1")
    [line] = log()
    assert "its files are still being read" in line


def test_a_ticket_that_cannot_be_checked_is_not_used(engine, monkeypatch):
    """Nor when the circuit breaker has switched the check off for its failures."""
    answer, ticket = engine("answer"), ticket_of(engine("think"), None)

    def fails(*_):
        raise RuntimeError("no check today")

    part = answer.scheduler._parts._parts[-1]
    monkeypatch.setattr(part._adapters, "difference", fails)
    for number in range(15):
        assert not is_moved(answer, None, ticket, f"r{number}")
    assert part.name in answer.scheduler._parts.off
    monkeypatch.undo()
    # It still says what does not fit.
    other = json.loads(json.dumps(ticket))
    other[FACTS]["layout"]["block_size"] = BLOCK_SIZE // 2
    assert not is_moved(answer, None, other, "other")
    assert is_moved(answer, None, ticket, "fits")


def known(adapter, **settings):
    """What an engine that has just started says of an adapter."""
    adapters = AdapterWeights(SimpleNamespace(**settings))
    return adapters.of(adapter, adapters.begin(adapter))


def wait_for(adapters, loaded):
    """Until the thread that reads the files is done."""
    while loaded.newest.result is lora_weights._PENDING:
        with adapters._turn:
            pass


def test_a_digest_is_of_all_that_a_worker_loads(tmp_path):
    """And of nothing else."""
    poet = adapter_in(tmp_path / "poet")
    before = known(poet, lora_dtype="float16").digest
    assert known(poet, lora_dtype="bfloat16").digest != before
    assert known(poet, lora_dtype="float16", target_modules=["o_proj"]).digest != before
    assert known(poet, lora_dtype="float16", max_loras=3).digest == before
    flat = LoRARequest("poet", 1, poet.lora_path, is_3d_lora_weight=True)
    assert known(flat, lora_dtype="float16").digest != before
    named = LoRARequest("bard", 7, poet.lora_path)
    assert known(named, lora_dtype="float16").digest == before
    # A file that vLLM does not load beside the one that it does.
    (tmp_path / "poet" / "adapter_model.bin").write_bytes(OTHER)
    (tmp_path / "poet" / "README.md").write_text("a poet")
    assert known(poet, lora_dtype="float16").digest == before
    scaled = adapter_in(tmp_path / "scaled", config={"r": 8, "lora_alpha": 2})
    assert known(scaled, lora_dtype="float16").digest != before
    binary = adapter_in(tmp_path / "binary", file="adapter_model.bin")
    assert known(binary).digest not in {before, NOT_KNOWN}


def test_content_decides_and_not_its_date(tmp_path):
    """A copy over the same content is no change; other content of that size and date is one."""
    poet, adapters = adapter_in(tmp_path / "poet"), AdapterWeights(None)
    loaded = adapters.begin(poet)
    before = adapters.of(poet, loaded)
    adapter_in(tmp_path / "poet")
    assert adapters.begin(poet) is loaded
    assert adapters.of(poet, loaded) == before
    file = tmp_path / "poet" / WEIGHTS
    dates = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(ONE[::-1])
    os.utime(file, ns=dates)
    assert adapters.of(poet, loaded).digest == NOT_KNOWN


@pytest.mark.parametrize(
    "path",
    ("no\0name", "~no-such-user/lora", "a" * 5000, "someone/poet", "/dev"),
    ids=lambda p: p[:9],
)
def test_a_path_without_files_is_not_known(path):
    weights = known(LoRARequest("poet", 1, path))
    assert weights.digest == NOT_KNOWN
    assert weights.why


def test_no_pipe_is_opened(tmp_path):
    """Its other end may never come."""
    poet = adapter_in(tmp_path / "poet")
    (tmp_path / "poet" / CONFIG).unlink()
    os.mkfifo(tmp_path / "poet" / CONFIG)
    assert "is no file" in known(poet).why


def test_files_that_cannot_be_opened_are_tried_again(tmp_path, monkeypatch):
    poet, adapters = adapter_in(tmp_path / "poet"), AdapterWeights(None)

    def fails(*_):
        raise OSError("not now")

    with monkeypatch.context() as broken:
        broken.setattr(lora_weights.hashlib, "file_digest", fails)
        loaded = adapters.begin(poet)
        assert adapters.of(poet, loaded).why == "not now"
    assert not adapters.of(poet, loaded).why
    # From now on as if they had been opened at once.
    adapter_in(tmp_path / "poet")
    assert not adapters.of(poet, loaded).why


def test_an_id_that_is_anothers_is_not_known(tmp_path):
    """Workers go on with the adapter that they have, unless it is loaded in place."""
    adapters = AdapterWeights(None)
    one, other = adapter_in(tmp_path / "one"), adapter_in(tmp_path / "other", OTHER)
    first, second = adapters.begin(one), adapters.begin(other)
    assert adapters.of(one, first).digest != NOT_KNOWN
    assert adapters.of(other, second).digest == NOT_KNOWN
    in_place = LoRARequest("poet", 1, other.lora_path, load_inplace=True)
    assert adapters.of(in_place, adapters.begin(in_place)).digest != NOT_KNOWN
    assert adapters.of(one, first).digest == NOT_KNOWN
    # One that was sent before the other was loaded, and comes late.
    assert adapters.of(one, adapters.begin(one)).digest == NOT_KNOWN


def test_an_adapter_that_is_in_no_file_is_not_known(tmp_path):
    """Frameworks of reinforcement learning send tensors under a path of their own."""

    class InMemory(LoRARequest):
        pass

    path = adapter_in(tmp_path / "poet").lora_path
    assert "it is a InMemory" in known(InMemory("poet", 1, path)).why


def test_only_so_many_adapters_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(lora_weights, "_MOST_KNOWN", 2)
    adapters = AdapterWeights(None)
    served = [adapter_in(tmp_path / f"{number}") for number in range(4)]
    served = [LoRARequest("a", number + 1, each.lora_path) for number, each in enumerate(served)]
    loaded = [adapters.begin(each) for each in served]
    assert len(adapters._by_folder) == len(adapters._by_id) == 2
    assert adapters.of(served[0], loaded[0]).digest == NOT_KNOWN
    assert adapters.of(served[3], loaded[3]).digest != NOT_KNOWN
