"""The tap on model runners made for the purpose, and what it takes for granted about vLLM."""

import gc
import itertools
import json
import logging
import pickle
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

from meridian_patch.engine import wire
from meridian_patch.engine.early_exit.signals import (
    MeasuredSignals,
    MeasurePlan,
    StepSignals,
    rows_of,
)
from meridian_patch.engine.worker import worker as worker_part
from meridian_patch.engine.worker.logits_measurement import Measured, RowSelection
from meridian_patch.engine.worker.worker import answers_scheduler, build_tapped_worker, put_tap
from meridian_patch.kernels.row_signals import row_signals_ref

VOCAB, WIDTH, BOUNDARY = 50, 64, 7
NAMES = ["a", "b", "c"]
MODEL = SimpleNamespace(
    runner_type="generate",
    dtype=torch.float32,
    head_dtype=torch.float32,
    get_vocab_size=lambda: VOCAB,
)


class InPlaceSampler:
    """Spoils its logits, as samplers may."""

    def __call__(self, logits, *args, **kwargs):
        logits.fill_(torch.nan)
        return self


class InPlaceModule(torch.nn.Module):
    def forward(self, logits, *args, **kwargs):
        logits.fill_(torch.nan)
        return self


class Later(AsyncModelRunnerOutput):
    def __init__(self, output):
        self.output = output

    def get_output(self):
        return self.output

    def get_kv_connector_output(self):
        return "kv"


class Runner:
    """One step at a time, of the logits that the step brings."""

    device = torch.device("cpu")
    rejection_sampler = None

    def __init__(self, make_output=None):
        self.sampler = self.make_sampler()
        self.make_output = make_output or (lambda: ModelRunnerOutput(NAMES, {}))

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self.step = scheduler_output

    def sample_tokens(self, grammar_output):
        self.run_sampler()
        return self.make_output()


class RunnerV1(Runner):
    make_sampler = InPlaceModule

    def __init__(self, make_output=None):
        super().__init__(make_output)
        self.rejection_sampler = InPlaceModule()
        self.input_batch = SimpleNamespace(req_ids=NAMES)

    def run_sampler(self):
        drafts = self.step.drafts
        metadata = drafts and SimpleNamespace(num_draft_tokens=drafts)
        self._sample(self.step.logits, metadata)

    def _sample(self, logits, spec_decode_metadata):
        if spec_decode_metadata is not None:
            self.sampler(logits=logits[:1].clone())
            return self.rejection_sampler(logits)
        return self.sampler(logits=logits)


class RunnerV2(Runner):
    make_sampler = InPlaceSampler
    batch_sharder = None

    def __init__(self, make_output=None):
        super().__init__(make_output)
        self.rejection_sampler = InPlaceSampler()

    def run_sampler(self):
        counts = [1 + n for n in self.step.drafts or [0] * len(NAMES)]
        starts = np.array([0, *itertools.accumulate(counts)], np.int32)
        batch = SimpleNamespace(req_ids=NAMES, cu_num_logits_np=starts)
        if self.step.drafts is None:
            return self.sampler(self.step.logits, batch)
        return self.rejection_sampler(self.step.logits, batch, None, None)


def step(plan=None, drafts=None, dtype=torch.float32, seed=0):
    n_rows = len(NAMES) + sum(drafts or ())
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(n_rows, WIDTH, generator=generator)).to(dtype)
    made = SimpleNamespace(logits=logits, drafts=drafts)
    if plan is not None:
        setattr(made, wire.PLAN, plan)
    return made


def reference(logits, rows):
    """float64, of the vocabulary without its padding."""
    return row_signals_ref(logits[:, :VOCAB].clone(), torch.tensor(rows), BOUNDARY)


def run(runner, made):
    runner.execute_model(made)
    result = runner.sample_tokens(None)
    return result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result


def assert_close(rows, expected):
    torch.testing.assert_close(
        torch.tensor(np.array(rows)).double(), expected, rtol=1e-4, atol=1e-6
    )


@pytest.fixture(params=[RunnerV1, RunnerV2], ids=["v1", "v2"])
def make_runner(request):
    def make(make_output=None):
        runner = request.param(make_output)
        put_tap(runner, MODEL)
        return runner

    return make


@pytest.fixture
def logged():
    """Messages of our logger, which keeps them from the root logger."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("vllm.meridian_patch")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_planned_rows_are_measured_before_the_sampler(make_runner, dtype):
    """Asked for two of three requests, their rows come, of logits that the sampler then spoils."""
    runner = make_runner()
    made = step(MeasurePlan(("c", "a", "gone"), BOUNDARY), dtype=dtype)
    expected = reference(made.logits, [0, 2])
    signals = getattr(run(runner, made), wire.SIGNALS).by_request()
    assert set(signals) == {"a", "c"}
    assert made.logits.isnan().all()
    assert_close([*signals["a"], *signals["c"]], expected)


def test_drafts_have_rows(make_runner):
    """Under speculation a request has one row more than drafts, in order, bonus row last."""
    runner = make_runner()
    made = step(MeasurePlan(("b", "c"), BOUNDARY), drafts=[1, 0, 2])
    expected = reference(made.logits, [2, 3, 4, 5])
    signals = getattr(run(runner, made), wire.SIGNALS).by_request()
    assert [len(signals[name]) for name in ("b", "c")] == [1, 3]
    assert_close([*signals["b"], *signals["c"]], expected)


def test_nothing_happens_without_a_plan(make_runner):
    """Not asked, or for no request of the batch: no signals; never asked: samplers untouched."""
    runner = make_runner()
    stock = type(runner.sampler), type(runner.rejection_sampler)
    assert not hasattr(run(runner, step()), wire.SIGNALS)
    assert (type(runner.sampler), type(runner.rejection_sampler)) == stock
    assert "_sample" not in vars(runner)
    assert not hasattr(run(runner, step(MeasurePlan(("gone",), BOUNDARY))), wire.SIGNALS)
    assert hasattr(run(runner, step(MeasurePlan(("a",), BOUNDARY))), wire.SIGNALS)
    assert not hasattr(run(runner, step()), wire.SIGNALS)


def test_a_plan_is_good_for_its_own_step(make_runner):
    """A step that ended in an exception leaves nothing behind for the next."""
    runner = make_runner()
    make_output, runner.make_output = runner.make_output, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(runner, step(MeasurePlan(("a",), BOUNDARY)))
    runner.make_output = make_output
    assert not hasattr(run(runner, step()), wire.SIGNALS)


def test_signals_wait_with_an_asynchronous_output(make_runner):
    """They come with get_output; the object stays what it is and dies without the collector."""
    runner = make_runner(lambda: Later(ModelRunnerOutput(NAMES, {})))
    made = step(MeasurePlan(("b",), BOUNDARY))
    expected = reference(made.logits, [1])
    runner.execute_model(made)
    result = runner.sample_tokens(None)
    assert type(result) is Later
    assert result.get_kv_connector_output() == "kv"
    assert not hasattr(result.output, wire.SIGNALS)
    assert_close(getattr(result.get_output(), wire.SIGNALS).by_request()["b"], expected)
    assert result.get_output() is result.output
    gone = weakref.ref(result)
    gc.disable()
    try:
        del result
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("result", (EMPTY_MODEL_RUNNER_OUTPUT, None, Later(None)))
def test_results_that_carry_nothing(make_runner, result):
    """The empty output, shared by all steps, stays as it is, and None stays None."""
    runner = make_runner(lambda: result)
    run(runner, step(MeasurePlan(("a",), BOUNDARY)))
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, wire.SIGNALS)


def test_a_failure_costs_the_signals_and_nothing_else(make_runner, logged):
    """A boundary outside of the vocabulary: steps go on without signals, and one line says so."""
    runner = make_runner()
    for _ in range(3):
        made = step(MeasurePlan(("a",), VOCAB))
        assert not hasattr(run(runner, made), wire.SIGNALS)
        assert made.logits.isnan().all()
    assert len(logged) == 1
    assert "failed at measuring" in logged[0]
    assert hasattr(run(runner, step(MeasurePlan(("a",), BOUNDARY))), wire.SIGNALS)


def test_rows_of_another_layout_are_not_guessed_at(make_runner, logged):
    """Fewer rows than the host knows of, as with adaptive verification: no signals, said once."""
    runner = make_runner()
    for _ in range(2):
        made = step(MeasurePlan(("a",), BOUNDARY), drafts=[1, 1, 1])
        made.logits = made.logits[:4]
        refusal = getattr(run(runner, made), wire.SIGNALS).refusal
        assert refusal == "its samplers get 4 rows, expected 6"
    assert len(logged) == 1
    assert "get 4 rows, expected 6" in logged[0]


def test_shared_sampling_is_not_measured(logged):
    """Where V2's ranks sample a part of the batch each, nothing is measured, and that is said."""
    runner = RunnerV2()
    runner.batch_sharder = object()
    put_tap(runner, MODEL)
    for _ in range(2):
        run(runner, step(MeasurePlan(("a",), BOUNDARY)))
    assert logged == ["meridian_patch: RunnerV2 measures no signals: its ranks share the sampling"]
    assert type(runner.sampler) is InPlaceSampler


def test_a_runner_of_another_make_is_left_alone(logged):
    """One without the two halves of a step gets no tap, which is said, and no exception."""
    runner = SimpleNamespace(device=torch.device("cpu"), execute_model=None)
    put_tap(runner, MODEL)
    assert set(vars(runner)) == {"device", "execute_model"}
    assert logged == [
        "meridian_patch: SimpleNamespace measures no signals: it has no sample_tokens"
    ]


class WorkerBase:
    def __init__(self, rank, model, **parallel):
        self.rank = rank
        self.model_config = model
        self.vllm_config = SimpleNamespace(kv_transfer_config=None)
        self.parallel_config = SimpleNamespace(
            **{
                "distributed_executor_backend": "mp",
                "tensor_parallel_size": 2,
                "prefill_context_parallel_size": 1,
                "world_size": 4,
            }
            | parallel
        )
        self.model_runner = None


POOLING = SimpleNamespace(**vars(MODEL) | {"runner_type": "pooling"})


@pytest.mark.parametrize(
    ("rank", "model", "backend", "is_tapped"),
    [
        (2, MODEL, "mp", True),
        (0, MODEL, "mp", False),
        (3, MODEL, "mp", False),
        (2, POOLING, "mp", False),
        (0, MODEL, "external_launcher", True),
    ],
)
def test_who_measures(rank, model, backend, is_tapped):
    """The rank whose output is read, or every rank where each has a scheduler of its own."""
    worker = build_tapped_worker(WorkerBase)(rank, model, distributed_executor_backend=backend)
    assert worker.model_runner is None
    runner = RunnerV1()
    worker.model_runner = runner
    assert worker.model_runner is runner
    assert ("sample_tokens" in vars(runner)) is is_tapped


def test_nixl_is_told_to_wait_with_the_runner(monkeypatch):
    """Connectors are built after it."""
    told = []
    monkeypatch.setattr(worker_part, "let_nixl_wait", told.append)
    worker = build_tapped_worker(WorkerBase)(0, POOLING)
    worker.model_runner = RunnerV1()
    assert told == [worker.vllm_config]


@pytest.mark.parametrize(
    ("tensor", "stages", "context"), itertools.product((1, 2, 4), (1, 3), (1, 2))
)
def test_the_executor_reads_the_rank_that_measures(tensor, stages, context):
    """Exactly one rank measures, the one whose output MultiprocExecutor returns."""
    parallel = SimpleNamespace(
        distributed_executor_backend="mp",
        tensor_parallel_size=tensor,
        prefill_context_parallel_size=context,
        world_size=tensor * stages * context,
    )
    executor = SimpleNamespace(parallel_config=parallel, world_size=parallel.world_size)
    measuring = [rank for rank in range(parallel.world_size) if answers_scheduler(rank, parallel)]
    assert measuring == [MultiprocExecutor._get_output_rank(executor)]


def test_extra_attributes_survive_the_way_between_processes():
    """Plan and signals are still there after pickling, and in no field that vLLM compares."""
    plan = MeasurePlan(("a",), BOUNDARY)
    scheduled, output = SchedulerOutput.make_empty(), ModelRunnerOutput(["a"], {"a": 0})
    setattr(scheduled, wire.PLAN, plan)
    values = np.array([[1.0, 2.0, 0.5, 0.25]], np.float32)
    setattr(output, wire.SIGNALS, MeasuredSignals(["a"], None, values))
    assert getattr(pickle.loads(pickle.dumps(scheduled)), wire.PLAN) == plan
    received = getattr(pickle.loads(pickle.dumps(output)), wire.SIGNALS).by_request()
    assert {name: table.tolist() for name, table in received.items()} == {"a": values.tolist()}


# What a process of any kind has imported when it loads plug-ins, and what a worker becomes.
JOB = """
import json, sys
import vllm.v1.engine.core, vllm.v1.executor.multiproc_executor
from vllm import LLM
early = "vllm.v1.worker.gpu_worker" in sys.modules
from meridian_patch.apply import apply_patches
apply_patches()
from_registering = "vllm.v1.worker.gpu_worker" in sys.modules
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker
print("RESULT" + json.dumps({
    "imported": [early, from_registering],
    "bases": [[base.__name__ for base in cls.__mro__] for cls in (CPUWorker, Worker)],
}))
"""


def test_workers_derive_from_the_patched_base():
    """No process imports the worker's module before it loads plug-ins, so ours is its base."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", JOB], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.rpartition("RESULT")[2])
    assert seen["imported"] == [False, False]
    cpu, gpu = seen["bases"]
    assert gpu == ["Worker", "TappedWorkerBase", "WorkerBase", "object"]
    assert cpu == ["CPUWorker", *gpu]


def test_a_second_engine_may_look_through_every_module():
    """On a CPU vLLM reads every global's `__dict__` when an engine starts, LLVM's library's too."""
    from vllm.triton_utils.dispatcher import _rebind_kernels

    import meridian_patch.engine.worker.row_signals_cpu  # noqa: F401 - what the first engine has imported

    _rebind_kernels([])


@pytest.mark.parametrize("is_later", [False, True], ids=["sync", "async"])
def test_a_closed_tap_tells_the_scheduler(is_later):
    """With each step that asks for signals, and with no other."""

    def make_output():
        output = ModelRunnerOutput(NAMES, {})
        return Later(output) if is_later else output

    runner = RunnerV2(make_output)
    runner.batch_sharder = object()
    put_tap(runner, MODEL)
    for _ in range(2):
        signals = getattr(run(runner, step(MeasurePlan(("a",), BOUNDARY))), wire.SIGNALS)
        assert signals.refusal == "its ranks share the sampling"
        assert signals.by_request() == {}
        assert pickle.loads(pickle.dumps(signals)) == signals
    assert not hasattr(run(runner, step()), wire.SIGNALS)


def test_what_is_sent_owns_its_memory():
    """Rows are kept for long: a view would keep a pinned buffer."""
    selection = RowSelection(MeasurePlan(("a",), BOUNDARY), ["a"], None)
    signals = Measured(selection, torch.ones(1, 4)).read()
    assert signals.values.tolist() == [[1.0] * 4]
    assert signals.values.flags.owndata


def test_views_of_others_memory_are_copied():
    """As Ray hands on: read-only views into its own store."""
    store = np.ones((2, 4), np.float32)
    view = store[:]
    view.flags.writeable = False
    signals = StepSignals()
    signals.receive(MeasuredSignals(["a", "b"], None, view))
    kept = [(signals.table, signals.spans["b"])]
    store[:] = 7
    assert rows_of(kept) == [[1.0] * 4]
    assert signals.rows("a", 1) == [[1.0] * 4]
    assert signals.table.flags.writeable
