"""A CPU worker of vLLM whose steps end when those of an emulated device would.

Chosen with ``--worker-cls meridian_patch.emulation.worker.EmulatedWorker``; 'meridian serve
--emulate' and 'meridian bench serve --emulate' do so. The model really runs. A step is only noted
when it is submitted; its work is done when the engine asks for the output, which it gets when the
device would have it. So EngineCore schedules the next step while one "runs", in a single thread.
"""

import copy
import ctypes
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from meridian_patch import envs
from meridian_patch.emulation.clock import DeviceClock, Window
from meridian_patch.emulation.cuda_stand_ins import put_stand_ins
from meridian_patch.emulation.device import check_supported, device_of
from meridian_patch.emulation.ledger import Ledger
from meridian_patch.emulation.report import ReportFile
from meridian_patch.emulation.shape import StepShapes

logger = init_logger("vllm.meridian_patch")

_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000
_SAY_EVERY_S = 10.0
# The patch makes it a property of the workers' base class.
_RUNNER_OF_BASE = getattr(CPUWorker, "model_runner", None)


@dataclass(slots=True)
class _Step:
    """A submitted step.

    Attributes:
        output: the scheduler's, as it was when the step was submitted.
        window: when the device runs it.
        is_prefill: it computes a prompt, or a part of one.
        grammar: what the sampler may choose from.
        is_sampled: the engine has asked for its tokens.
        result: the runner's, once the work is done.
        is_done: the work is done.
        work_s: seconds that it took.
    """

    output: Any
    window: Window
    is_prefill: bool
    grammar: Any = None
    is_sampled: bool = False
    result: Any = None
    is_done: bool = False
    work_s: float = 0.0


class _Later(AsyncModelRunnerOutput):
    """The output of a step, which is there when the device has it."""

    def __init__(self, worker: "EmulatedWorker", step: _Step) -> None:
        self._worker = worker
        self._step = step

    def get_output(self) -> Any:
        return self._worker.deliver(self._step)

    def get_kv_connector_output(self) -> Any:
        """What a connector did in the step; asked for by vLLM from 0.33 on."""
        return self._worker.deliver(self._step).kv_connector_output


class EmulatedWorker(CPUWorker):
    """Runs the model on the CPU, on a device's time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._queue: deque[_Step] = deque()
        self._is_working = False
        self._runner_of_device: Any = None
        super().__init__(*args, **kwargs)
        self._device = device_of(envs.environment())
        check_supported(self._device, self.vllm_config)
        self._clock = DeviceClock()
        self._shapes = StepShapes()
        self._ledger = Ledger()
        self._said_s, self._said_steps = -inf, 0
        # CPU time of the engine's thread when it left the worker, and since the last output.
        self._left_cpu_s, self._engine_s = time.thread_time(), 0.0
        rank = self.parallel_config.data_parallel_index
        self._report = ReportFile(envs.emulation_report(envs.environment()), rank)

    def init_device(self) -> None:
        """Build the model runner, as a GPU's would be built."""
        put_stand_ins()
        _wake_in_time()
        super().init_device()
        facts = {
            "device": self._device.name,
            "provenance": self._device.provenance,
            "cost": self._device.cost.model_dump(exclude={"derivation"}, exclude_none=True),
            "tokens": self._device.tokens,
            "is_async": bool(self.scheduler_config.async_scheduling),
            "runner": "V2" if self.use_v2_model_runner else "V1",
        }
        self._report.begin(facts)
        logger.info(
            "meridian_patch: %s, model runner %s, %s scheduling: its figures are emulated",
            facts["provenance"],
            facts["runner"],
            "asynchronous" if facts["is_async"] else "synchronous",
        )

    @property
    def model_runner(self) -> Any:
        """The runner, with no step under way: what asks for it may read or change the model.

        Load-bearing: all of a worker's methods reach the model through this attribute.
        """
        if not self._is_working:
            self._catch_up()
        return self._runner_of_device

    @model_runner.setter
    def model_runner(self, runner: Any) -> None:
        if isinstance(_RUNNER_OF_BASE, property) and _RUNNER_OF_BASE.fset:
            _RUNNER_OF_BASE.fset(self, runner)
        self._runner_of_device = runner

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Count what the engine's thread did since it was here last as the engine's own."""
        self._engine_s += time.thread_time() - self._left_cpu_s
        try:
            yield
        finally:
            self._left_cpu_s = time.thread_time()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Submit a step to the device; its work is done later."""
        with self._entered():
            return self._submit(scheduler_output)

    def _submit(self, scheduler_output: Any) -> Any:
        work = self._shapes.read(scheduler_output)
        window = self._clock.submit(time.perf_counter(), self._device.step_seconds(work))
        step = _Step(_kept(scheduler_output), window, bool(work.prefill_tokens))
        launch_s = self._device.launch_seconds(work)
        if launch_s:
            self._launch(window.start_s + launch_s)
        self._queue.append(step)
        # Load-bearing: the engine asks for a sample of each step with tokens, and for no other's.
        return None if scheduler_output.total_num_scheduled_tokens else _Later(self, step)

    def _launch(self, until_s: float) -> None:
        """Keep the engine until the device has been given all kernels of a step."""
        self._catch_up()
        time.sleep(max(until_s - time.perf_counter(), 0.0))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The tokens of the step that was submitted last, once the device has them."""
        with self._entered():
            step = self._queue[-1]
            step.grammar, step.is_sampled = _kept_rows(grammar_output), True
            return _Later(self, step)

    def deliver(self, step: _Step) -> Any:
        """Do a step's work, wait until the device has its output, and return that."""
        with self._entered():
            return self._deliver(step)

    def _deliver(self, step: _Step) -> Any:
        asked_s = time.perf_counter()
        while not step.is_done:
            self._work_off(self._queue[0])
        ready_s = handed_s = time.perf_counter()
        if step.window.due_s > ready_s:
            time.sleep(step.window.due_s - ready_s)
            handed_s = time.perf_counter()
        if step.is_sampled:
            self._ledger.record(
                step.window,
                is_prefill=step.is_prefill,
                asked_s=asked_s,
                ready_s=ready_s,
                handed_s=handed_s,
                work_s=step.work_s,
                engine_s=self._engine_s,
            )
            self._engine_s = 0.0
            self._report.write_sometimes(self._ledger, handed_s)
        else:
            # The engine has nothing more to do.
            self._report.write(self._ledger, handed_s)
            self._say_verdict(handed_s)
        return step.result

    def shutdown(self) -> None:
        """End, with steps under way. What there is to say was said: a server kills its engine."""
        self._queue.clear()
        super().shutdown()

    def _say_verdict(self, now_s: float) -> None:
        """Log how late the device was, now and then and only what is new."""
        if self._ledger.steps == self._said_steps or now_s - self._said_s < _SAY_EVERY_S:
            return
        self._said_s, self._said_steps = now_s, self._ledger.steps
        logger.info("meridian_patch: %s: %s", self._device.provenance, self._ledger.sentence())

    def _catch_up(self) -> None:
        """Do the work of all steps that can be done; the last may wait for its grammar."""
        while self._queue and (
            self._queue[0].is_sampled or not self._queue[0].output.total_num_scheduled_tokens
        ):
            self._work_off(self._queue[0])

    def _work_off(self, step: _Step) -> None:
        """Do the work of the first step of the queue."""
        assert self._queue.popleft() is step
        began_s = time.perf_counter()
        self._is_working = True
        try:
            result = super().execute_model(step.output)
            if result is None and step.is_sampled:
                result = super().sample_tokens(step.grammar)
            if isinstance(result, AsyncModelRunnerOutput):
                result = result.get_output()
        finally:
            self._is_working = False
        step.result, step.is_done = result, True
        step.work_s = time.perf_counter() - began_s


def _kept(output: Any) -> Any:
    """A scheduler's output with copies of what the scheduler goes on to change.

    Load-bearing: a worker in EngineCore's process gets the request's own lists of tokens, to which
    outputs of earlier steps are appended, and drafts that are filtered in place. All else is made
    for the step. Fields that others have added stay.
    """
    kept = copy.copy(output)
    kept.scheduled_new_reqs = [
        replace(
            new,
            prompt_token_ids=_copied(new.prompt_token_ids),
            prefill_token_ids=_copied(new.prefill_token_ids),
        )
        for new in output.scheduled_new_reqs
    ]
    kept.scheduled_spec_decode_tokens = {
        name: list(drafts) for name, drafts in output.scheduled_spec_decode_tokens.items()
    }
    return kept


def _kept_rows(grammar_output: Any) -> Any:
    """A grammar's rows as they are now. Load-bearing: the next step's are written over them."""
    if grammar_output is None:
        return None
    return replace(grammar_output, grammar_bitmask=grammar_output.grammar_bitmask.copy())


def _copied(tokens: list[int] | None) -> list[int] | None:
    return None if tokens is None else list(tokens)


def _wake_in_time() -> None:
    """Let this thread sleep to the microsecond; Linux' default is 50 late."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
