"""Reads the logits that a model runner is about to sample from, in steps that have a plan.

::

    execute_model(scheduler_output)   take the step's plan
    the samplers' input               measure it, once per step: raw logits after the grammar's
                                      mask, as vLLM's own ``raw_logits``
    sample_tokens() returns           attach the signals to its result for the scheduler

Without a plan the runner is not changed. An error here is logged once, and the step's result has no
signals. If a runner cannot be measured at all, the results of steps with a plan say so, and the
scheduler stops asking.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

from meridian_patch.engine import wire
from meridian_patch.engine.early_exit.signals import MeasuredSignals, MeasurePlan
from meridian_patch.engine.worker.logits_measurement import Measured, Meter, RowSelection

logger = init_logger("vllm.meridian_patch")


def _guarded(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: an exception in a method of the tap is reported and not raised further."""

    def decorate(method: Callable[..., None]) -> Callable[..., None]:
        @wraps(method)
        def call(self: "Tap", *args: Any, **kwargs: Any) -> None:
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self.report(what, error)

        return call

    return decorate


class Refused:
    """Is sent to the scheduler in place of signals, if the runner cannot be measured."""

    def __init__(self, why: str) -> None:
        self._why = why

    def read(self) -> MeasuredSignals:
        return MeasuredSignals((), None, None, self._why)


class Tap:
    """The tap of one model runner, of either generation."""

    def __init__(self, runner: Any, vocab_size: int) -> None:
        self._runner = runner
        self._meter = Meter(vocab_size)
        self._plan: MeasurePlan | None = None
        self._measured: Measured | None = None
        # Rows of the last step, reused because they rarely change.
        self._selection: RowSelection | None = None
        self._is_fitted = False
        # Why signals cannot be measured; never reset.
        self._refusal: str | None = None
        self._is_reported = False

    @_guarded("compiling its kernel")
    def warm_up(self, device: torch.device, dtypes: set[torch.dtype]) -> None:
        self._meter.warm_up(device, dtypes)

    def begin(self, scheduler_output: Any) -> None:
        """Take the plan of a step that begins, if it has one."""
        # Read only, because executors may pass the same object to a later pipeline stage.
        self._plan = getattr(scheduler_output, wire.PLAN, None)
        self._measured = None
        if self._plan is None or self._is_fitted:
            return
        self._is_fitted = True
        self._fit()

    def end(self, result: Any) -> Any:
        """Attach the signals of a step that ends to the runner's result."""
        measured: Measured | Refused | None = self._measured
        if self._refusal is not None and self._plan is not None:
            measured = Refused(self._refusal)
        self._measured = self._plan = None
        if measured is not None:
            is_later = isinstance(result, AsyncModelRunnerOutput)
            (self._attach_later if is_later else self._attach)(result, measured)
        return result

    def see(
        self, logits: torch.Tensor, req_ids: Sequence[str], starts: Sequence[int] | None
    ) -> None:
        """Measure the logits that a sampler receives; see ``RowSelection`` for the layout."""
        plan = self._plan
        if plan is None or self._refusal is not None:
            return
        expected = len(req_ids) if starts is None else starts[-1]
        if expected != len(logits):
            self._close(f"its samplers get {len(logits)} rows, expected {expected}")
            return
        if self._selection is None or not self._selection.are_of(plan, req_ids, starts):
            self._selection = RowSelection(plan, req_ids, starts)
        if self._selection.names:
            self._measured = self._meter.measure(logits, self._selection, plan.boundary_id)

    @_guarded("fitting it to the model runner")
    def _fit(self) -> None:
        runner = self._runner
        # Load-bearing: V1 calls its samplers only in `_sample` and in dummy runs. The samplers
        # cannot be wrapped: under speculation the rejection sampler calls the plain one on some of
        # the rows.
        if hasattr(runner, "_sample"):
            runner._sample = _before(runner._sample, self._see_v1)
        elif getattr(runner, "batch_sharder", None) is not None:
            # Each rank samples some of the requests, but only one sends its output.
            self._close("its ranks share the sampling")
        else:
            # Load-bearing: V2 passes the logits to one of these two in the method that computes
            # them, which has no other place to read them.
            for sampler in (runner.sampler, runner.rejection_sampler):
                if sampler is not None:
                    _call_before(sampler, self._see_v2)

    @_guarded("measuring")
    def _see_v1(self, logits: torch.Tensor, spec_decode_metadata: Any) -> None:
        if self._plan is None:
            return
        # Load-bearing: row i belongs to the batch's request i. With drafts, each request has one
        # row per draft and a last one for the bonus token.
        drafts, starts = getattr(spec_decode_metadata, "num_draft_tokens", None), None
        if drafts is not None:
            starts = list(accumulate((1 + number for number in drafts), initial=0))
        self.see(logits, self._runner.input_batch.req_ids, starts)

    @_guarded("measuring")
    def _see_v2(self, logits: torch.Tensor, input_batch: Any, *_: Any, **__: Any) -> None:
        if self._plan is None:
            return
        # Load-bearing: V2's row offsets on the host. Adaptive verification drops rows on the device
        # only, so these would not match.
        starts: list[int] | None = input_batch.cu_num_logits_np.tolist()
        if starts == list(range(len(input_batch.req_ids) + 1)):
            starts = None
        self.see(logits, input_batch.req_ids, starts)

    @_guarded("handing on its numbers")
    def _attach_later(self, result: Any, measured: Measured | Refused) -> None:
        """Attach when the output is read. Load-bearing: ``get_output`` is called on it, once."""

        def get_output() -> Any:
            # Restore the class's own method: the reference cycle of result and function would keep
            # the GPU's tensors alive.
            del result.get_output
            output = result.get_output()
            self._attach(output, measured)
            return output

        result.get_output = get_output

    @_guarded("reading its numbers")
    def _attach(self, output: Any, measured: Measured | Refused) -> None:
        # Load-bearing: the empty output is one shared object for all steps.
        if isinstance(output, ModelRunnerOutput) and output is not EMPTY_MODEL_RUNNER_OUTPUT:
            setattr(output, wire.SIGNALS, measured.read())

    def _close(self, why: str) -> None:
        self._refusal = why
        logger.warning(
            "meridian_patch: %s measures no signals: %s", type(self._runner).__name__, why
        )

    def report(self, what: str, error: Exception) -> None:
        """Log an error of the tap once; the step continues without signals."""
        if not self._is_reported:
            self._is_reported = True
            logger.error(
                "meridian_patch: the tap failed at %s; steps go without signals",
                what,
                exc_info=error,
            )


def _before(inner: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    """A function that calls ``look`` with its arguments before ``inner``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return inner(*args, **kwargs)

    return call


def _call_before(instance: Any, look: Callable[..., None]) -> None:
    """Make calls of one callable object call ``look`` first.

    Python looks ``__call__`` up on the class, so the object's class is replaced by a subclass.
    """
    cls = type(instance)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return cls.__call__(self, *args, **kwargs)

    instance.__class__ = type(f"Tapped{cls.__name__}", (cls,), {"__call__": call})
