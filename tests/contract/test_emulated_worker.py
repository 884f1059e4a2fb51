"""What the emulated worker relies on in vLLM, without a model."""

import copy
import random
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scheduler_driver import Driver, Job, engine_config, make_prompt
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import UnspecifiedPlatform
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from meridian_patch import envs
from meridian_patch.emulation import worker as worker_module
from meridian_patch.emulation.clock import DeviceClock
from meridian_patch.emulation.cuda_stand_ins import put_stand_ins
from meridian_patch.emulation.device import load_device
from meridian_patch.emulation.ledger import WARM_UP_STEPS, Ledger
from meridian_patch.emulation.options import WORKER
from meridian_patch.emulation.report import ReportFile
from meridian_patch.emulation.server import keep_async_scheduling
from meridian_patch.emulation.shape import StepShapes
from meridian_patch.emulation.worker import EmulatedWorker
from meridian_patch.engine.device import accelerator_name
from meridian_patch.errors import ConfigError
from meridian_patch.replay.step_log import step_work

DEVICE = "h100-32b-dense"


@pytest.fixture
def driver(demo_model, request):
    """Stock's scheduler with requests that preempt each other, for one of the runners."""
    is_v2, is_async = request.param
    config = engine_config(demo_model, is_async=is_async, blocks=24)
    driver = Driver.build(None, config, is_async=is_async)
    driver.scheduler.use_v2_model_runner = is_v2
    rng = random.Random(3)
    for number in range(12):
        prompt = tuple(make_prompt(rng, rng.randrange(20, 400), thinks=True))
        driver.add(Job(f"r{number}", prompt, rng.randrange(40, 150), 20))
    return driver


both_runners = pytest.mark.parametrize(
    "driver",
    [(False, False), (False, True), (True, True)],
    ids=["V1 sync", "V1 async", "V2 async"],
    indirect=True,
)


def watch(driver: Driver, see) -> None:
    """Call ``see`` with each scheduler output as soon as it is made."""
    schedule = driver.scheduler.schedule

    def seen(*args, **kwargs):
        output = schedule(*args, **kwargs)
        see(output)
        return output

    driver.scheduler.schedule = seen


@both_runners
def test_shapes_of_steps_are_those_of_a_replay(driver):
    """From the output alone as from the scheduler's requests, with chunks and resumes."""
    shapes, found, wanted, preempted = StepShapes(), [], [], []

    def see(output):
        wanted.append(step_work(output.num_scheduled_tokens, driver.scheduler.requests))
        found.append(shapes.read(output))
        preempted.extend(output.preempted_req_ids or ())

    watch(driver, see)
    driver.drain()
    assert preempted
    assert found == wanted


@both_runners
def test_a_kept_output_stays_as_it_was(driver):
    """The scheduler goes on for two steps before the work of a step is done."""
    changed, kept = [], []

    def see(output):
        if output.scheduled_new_reqs:
            kept.append((output, worker_module._kept(output), copy.deepcopy(output)))

    watch(driver, see)
    driver.drain()
    assert len(kept) > 3
    for output, ours, was in kept:
        for name in ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"):
            assert getattr(ours, name) == getattr(was, name)
        changed.append(output.scheduled_new_reqs != was.scheduled_new_reqs)
    # Without the copy, runner V2 would compute tokens that were sampled later.
    assert any(changed) == driver.scheduler.use_v2_model_runner


def test_a_kept_output_has_what_others_added():
    output = SimpleNamespace(scheduled_new_reqs=[], scheduled_spec_decode_tokens={"a": [1]}, more=5)
    kept = worker_module._kept(output)
    output.scheduled_spec_decode_tokens["a"].append(2)
    assert (kept.more, kept.scheduled_spec_decode_tokens) == (5, {"a": [1]})


class Fake:
    """What stands in for the CPU worker's own methods and for the clock; notes calls."""

    def __init__(self, monkeypatch, seconds: float = 0.0) -> None:
        self.calls = []
        self.now_s, self.cpu_s = 100.0, 0.0
        fake = self
        clock = SimpleNamespace(
            perf_counter=lambda: self.now_s, sleep=self.sleep, thread_time=lambda: self.cpu_s
        )
        monkeypatch.setattr(worker_module, "time", clock)

        def execute_model(worker, output):
            fake.calls.append(("execute", output.name, worker.model_runner))
            fake.sleep(seconds)
            fake.cpu_s += seconds
            return None if output.total_num_scheduled_tokens else ModelRunnerOutput([], {})

        def sample_tokens(_worker, grammar):
            fake.calls.append(("sample", grammar))
            return ModelRunnerOutput([f"sampled {len(fake.calls)}"], {})

        monkeypatch.setattr(worker_module.CPUWorker, "execute_model", execute_model)
        monkeypatch.setattr(worker_module.CPUWorker, "sample_tokens", sample_tokens)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def a_worker(step_s: float = 0.02) -> EmulatedWorker:
    """A worker that has started, on a device whose steps all take so long."""
    worker = object.__new__(EmulatedWorker)
    vars(worker).update(
        _queue=worker_module.deque(),
        _is_working=False,
        _runner_of_device="runner",
        _device=SimpleNamespace(
            provenance="emulated",
            step_seconds=lambda work: step_s if work.decode_seqs else 0.0,
            launch_seconds=lambda work: 0.0,
        ),
        _clock=DeviceClock(),
        _shapes=StepShapes(),
        _ledger=Ledger(warm_up_steps=WARM_UP_STEPS),
        _report=ReportFile(None),
        _said_s=-inf,
        _said_steps=0,
        _left_cpu_s=0.0,
        _engine_s=0.0,
    )
    return worker


def a_step(name: str, tokens: int = 1) -> SimpleNamespace:
    cached = SimpleNamespace(
        req_ids=["a"][:tokens],
        num_computed_tokens=[7][:tokens],
        resumed_req_ids=set(),
        all_token_ids={},
    )
    return SimpleNamespace(
        name=name,
        num_scheduled_tokens={"a": 1} if tokens else {},
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(),
    )


def test_work_is_done_when_its_output_is_asked_for(monkeypatch):
    """Two steps are submitted at once and take two steps' time; each is worked off in order."""
    fake, worker = Fake(monkeypatch, seconds=0.005), a_worker()
    assert worker.execute_model(a_step("1")) is None
    first = worker.sample_tokens(None)
    assert worker.execute_model(a_step("2")) is None
    second = worker.sample_tokens(None)
    assert not fake.calls
    assert first.get_output().req_ids == ["sampled 2"]
    assert fake.now_s == pytest.approx(100.02)
    assert [call[1] for call in fake.calls] == ["1", None]
    assert second.get_output().req_ids == ["sampled 4"]
    assert fake.now_s == pytest.approx(100.04)
    assert (worker._ledger.decode.steps, worker._ledger.overlapped_steps) == (2, 1)
    assert worker._ledger.decode.late_steps == 0


def test_a_step_without_tokens_has_an_output_of_its_own(monkeypatch):
    """It is worked off behind those before it, and takes the device no time."""
    fake, worker = Fake(monkeypatch), a_worker()
    worker.execute_model(a_step("1"))
    later = worker.sample_tokens(None)
    assert worker.execute_model(a_step("none", tokens=0)).get_output().req_ids == []
    assert [call[1] for call in fake.calls] == ["1", None, "none"]
    later.get_output()
    assert worker._ledger.decode.steps == 1


def test_the_verdict_is_logged_when_there_is_nothing_to_do(monkeypatch):
    """Once per ten seconds, and only what is new."""
    fake, worker, said = Fake(monkeypatch), a_worker(step_s=0.02), []
    monkeypatch.setattr(worker_module.logger, "info", lambda *words: said.append(words))
    for _ in range(2):
        worker.execute_model(a_step("1"))
        worker.sample_tokens(None).get_output()
        for _ in range(2):
            worker.execute_model(a_step("none", tokens=0)).get_output()
    assert len(said) == 1
    fake.now_s += 10
    for _ in range(2):
        worker.execute_model(a_step("none", tokens=0)).get_output()
    assert [words[1] for words in said] == ["emulated"] * 2


def test_what_asks_for_the_runner_finds_no_step_under_way(monkeypatch):
    """But the one whose grammar is still to come: it may not be sampled yet."""
    fake, worker = Fake(monkeypatch), a_worker()
    worker.execute_model(a_step("1"))
    first = worker.sample_tokens(None)
    worker.execute_model(a_step("2"))
    assert worker.model_runner == "runner"
    assert [call[1] for call in fake.calls] == ["1", None]
    rows = GrammarOutput(["a"], np.zeros((1, 9), np.int32))
    second = worker.sample_tokens(rows)
    rows.grammar_bitmask[:] = -1
    first.get_output()
    second.get_output()
    assert [call[0] for call in fake.calls] == ["execute", "sample"] * 2
    # The rows are those of the step, though the next step's were written over them.
    assert not fake.calls[-1][1].grammar_bitmask.any()


def test_work_that_outlasts_its_step_is_late(monkeypatch):
    fake, worker = Fake(monkeypatch, seconds=0.03), a_worker(step_s=0.01)
    worker.execute_model(a_step("1"))
    worker.sample_tokens(None).get_output()
    assert fake.now_s == pytest.approx(100.03)
    assert worker._ledger.decode.late_s == pytest.approx(0.02)
    assert worker._ledger.decode.work_s == pytest.approx(0.03)


def test_the_engines_own_time_is_what_it_takes_outside_of_the_worker(monkeypatch):
    """To schedule a step, and to take its tokens in; the model's work is not the engine's."""
    fake, worker = Fake(monkeypatch, seconds=0.005), a_worker()
    for _ in range(2):
        fake.cpu_s += 0.002
        worker.execute_model(a_step("1"))
        fake.cpu_s += 0.001
        worker.sample_tokens(None).get_output()
        fake.cpu_s += 0.0005
    assert worker._ledger.decode.engine_s == pytest.approx(0.0065)
    assert worker._ledger.decode.work_s == pytest.approx(0.01)


def test_the_executor_asks_for_an_output_when_the_engine_does():
    """Load-bearing: what `sample_tokens` returns is opened by `result`, and not before."""
    opened = []
    later = worker_module._Later(SimpleNamespace(deliver=opened.append), "step")
    executor = object.__new__(UniProcExecutor)
    executor.driver_worker = SimpleNamespace(
        execute_model=lambda _: None, sample_tokens=lambda _: later
    )
    assert executor.execute_model(None, non_block=True).result() is None
    future = executor.sample_tokens(None, non_block=True)
    assert not future.done()
    assert not opened
    future.result()
    assert opened == ["step"]


def test_sampled_tokens_are_copied_without_cuda(monkeypatch):
    """Load-bearing: V1's output of a step takes streams and events by these four names."""
    for name in ("Event", "Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, None)
    put_stand_ins()
    output = AsyncGPUModelRunnerOutput(
        ModelRunnerOutput(["a", "b"], {"a": 0, "b": 1}),
        torch.tensor([[5], [6]]),
        None,
        [1],
        torch.cuda.Stream(),
        264,
    )
    assert output.get_output().sampled_token_ids == [[5], []]


@pytest.fixture
def engine(demo_model, monkeypatch):
    """Builds vLLM's configuration of an engine on an emulated device."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    platform = type(current_platform)
    # The patched method is put back.
    monkeypatch.setattr(
        platform, "check_and_update_config", vars(platform)["check_and_update_config"]
    )
    keep_async_scheduling(load_device(DEVICE))
    small = {"model": str(demo_model), "dtype": "float32", "max_model_len": 256}

    def build(**options):
        return EngineArgs(**small, worker_cls=WORKER, **options).create_engine_config()

    return build


def test_scheduling_stays_asynchronous_on_the_cpu(engine):
    """As vLLM decides it, or as the user does; the executor has no process of its own."""
    config = engine()
    assert config.scheduler_config.async_scheduling is True
    assert config.parallel_config.distributed_executor_backend == "uni"
    assert engine(async_scheduling=False).scheduler_config.async_scheduling is False
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert engine(speculative_config=speculative).scheduler_config.async_scheduling is False


def test_a_pipeline_is_refused(engine):
    with pytest.raises(ConfigError, match="--pipeline-parallel-size is above 1"):
        engine(pipeline_parallel_size=2)


def test_a_worker_without_a_device_says_how_to_name_one(monkeypatch):
    monkeypatch.delenv(envs.EMULATE, raising=False)
    with pytest.raises(ConfigError, match=r"MERIDIAN_PATCH_EMULATE is not set.*--emulate DEVICE"):
        worker_module.device_of(envs.environment())


@pytest.mark.parametrize("platform", [current_platform, UnspecifiedPlatform()])
def test_a_build_that_sees_no_device_has_no_accelerator(monkeypatch, platform):
    """The CPU's build, and a CUDA build on a machine without a GPU."""
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    assert accelerator_name() is None
