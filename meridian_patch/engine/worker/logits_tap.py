"""Reads the logits that a model runner is about to sample from, in the steps that ask for it.

::

    execute_model(scheduler_output)   takes the step's plan
    the samplers' input               measured, once per step: raw logits after the grammar's mask,
                                      as vLLM's own ``raw_logits``
    sample_tokens() returns           the signals go with its result to the scheduler

A runner that is never asked is left as it is. What fails here is logged once, and that step's
result goes without signals. Where a runner cannot be measured at all, the results of the steps that
ask for it say so, and the scheduler asks no more.
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

from meridian_patch.engine.early_exit.signals import PLAN_FIELD, SIGNALS_FIELD, MeasurePlan, Signals
from meridian_patch.engine.worker.logits_measurement import Measured, Meter, Spans

logger = init_logger("vllm.meridian_patch")


def _guarded(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: an exception ends a method of the tap, is reported, and goes no further."""

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
    """Goes to the scheduler in place of a step's signals, where there never will be any."""

    def __init__(self, why: str) -> None:
        self._why = why

    def read(self) -> Signals:
        return Signals((), None, None, self._why)


class Tap:
    """The tap of one model runner, of either generation."""

    def __init__(self, runner: Any, vocab_size: int) -> None:
        self._runner = runner
        self._meter = Meter(vocab_size)
        self._plan: MeasurePlan | None = None
        self._measured: Measured | None = None
        # The last step's: those of the next are the same nearly always.
        self._spans: Spans | None = None
        self._is_fitted = False
        # Why signals cannot be had, set for good.
        self._refusal: str | None = None
        self._is_reported = False

    @_guarded("compiling its kernel")
    def warm_up(self, device: torch.device, dtypes: set[torch.dtype]) -> None:
        self._meter.warm_up(device, dtypes)

    def begin(self, scheduler_output: Any) -> None:
        """A step begins: take its plan, if it has one."""
        # Only read: executors may hand the same object to a later pipeline stage.
        self._plan = getattr(scheduler_output, PLAN_FIELD, None)
        self._measured = None
        if self._plan is None or self._is_fitted:
            return
        self._is_fitted = True
        self._fit()

    def end(self, result: Any) -> Any:
        """A step ends: let the signals go with what the runner returns."""
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
        """A sampler is given logits; see ``Spans`` for the layout."""
        plan = self._plan
        if plan is None or self._refusal is not None:
            return
        expected = len(req_ids) if starts is None else starts[-1]
        if expected != len(logits):
            self._close(f"its samplers get {len(logits)} rows, expected {expected}")
            return
        if self._spans is None or not self._spans.are_of(plan, req_ids, starts):
            self._spans = Spans(plan, req_ids, starts)
        if self._spans.names:
            self._measured = self._meter.measure(logits, self._spans, plan.boundary_id)

    @_guarded("fitting it to the model runner")
    def _fit(self) -> None:
        runner = self._runner
        # Load-bearing: V1 samples in _sample and calls its samplers nowhere else but in dummy
        # runs; under speculation the rejection sampler calls the plain one on part of the rows.
        if hasattr(runner, "_sample"):
            runner._sample = _before(runner._sample, self._see_v1)
        elif getattr(runner, "batch_sharder", None) is not None:
            # Each rank samples some of the requests, and only one rank answers the scheduler.
            self._close("its ranks share the sampling")
        else:
            # Load-bearing: V2 computes the logits and calls one of these two in one method.
            for sampler in (runner.sampler, runner.rejection_sampler):
                if sampler is not None:
                    _call_before(sampler, self._see_v2)

    @_guarded("measuring")
    def _see_v1(self, logits: torch.Tensor, spec_decode_metadata: Any) -> None:
        if self._plan is None:
            return
        # Load-bearing: row i is the batch's request i; with drafts each has one row more than it
        # has drafts, the bonus token's last.
        drafts, starts = getattr(spec_decode_metadata, "num_draft_tokens", None), None
        if drafts is not None:
            starts = list(accumulate((1 + number for number in drafts), initial=0))
        self.see(logits, self._runner.input_batch.req_ids, starts)

    @_guarded("measuring")
    def _see_v2(self, logits: torch.Tensor, input_batch: Any, *_: Any, **__: Any) -> None:
        if self._plan is None:
            return
        # Load-bearing: what V2 has on the host; adaptive verification moves rows on the device
        # alone, and then there are fewer of them.
        starts: list[int] | None = input_batch.cu_num_logits_np.tolist()
        if starts == list(range(len(input_batch.req_ids) + 1)):
            starts = None
        self.see(logits, input_batch.req_ids, starts)

    @_guarded("handing on its numbers")
    def _attach_later(self, result: Any, measured: Measured | Refused) -> None:
        """Load-bearing: whoever wants the output calls ``get_output`` on this object, once."""

        def get_output() -> Any:
            # The class's own again, or result and function would keep each other alive, and the
            # GPU's tensors with them.
            del result.get_output
            output = result.get_output()
            self._attach(output, measured)
            return output

        result.get_output = get_output

    @_guarded("reading its numbers")
    def _attach(self, output: Any, measured: Measured | Refused) -> None:
        # Load-bearing: the empty output is one object for all steps.
        if isinstance(output, ModelRunnerOutput) and output is not EMPTY_MODEL_RUNNER_OUTPUT:
            setattr(output, SIGNALS_FIELD, measured.read())

    def _close(self, why: str) -> None:
        self._refusal = why
        logger.warning(
            "meridian_patch: %s measures no signals: %s", type(self._runner).__name__, why
        )

    def report(self, what: str, error: Exception) -> None:
        """Something of ours failed, and nothing else may."""
        if not self._is_reported:
            self._is_reported = True
            logger.error(
                "meridian_patch: the tap failed at %s; steps go without signals",
                what,
                exc_info=error,
            )


def _before(inner: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    """A function that lets ``look`` have the arguments first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return inner(*args, **kwargs)

    return call


def _call_before(instance: Any, look: Callable[..., None]) -> None:
    """Make calls of one callable object go to ``look`` first.

    ``instance()`` looks ``__call__`` up on the class, so the object gets a subclass of its own.
    """
    cls = type(instance)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return cls.__call__(self, *args, **kwargs)

    instance.__class__ = type(f"Tapped{cls.__name__}", (cls,), {"__call__": call})
