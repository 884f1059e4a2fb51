"""Measures the entropy of each sampled token on a stock engine, by a patched one's tap."""

import math
from typing import Any

from vllm import LLM

from meridian_patch.engine import wire
from meridian_patch.engine.early_exit.signals import (
    MeasuredSignals,
    MeasurePlan,
)
from meridian_patch.engine.worker.worker import answers_scheduler, put_tap
from meridian_patch.replay.in_process import caller_id, core_of

# The probability of the boundary is not used here.
_ANY_TOKEN = 0


class SampledEntropies:
    """Entropies (nats) of the raw logits that the tokens of chosen requests are sampled from.

    No class of vLLM is replaced: methods of its scheduler are wrapped to add what to measure, and
    the model runners get the tap that they have in a patched server.

    Args:
        llm: with an engine core in this process, and no requests yet.
    """

    def __init__(self, llm: LLM) -> None:
        self._scheduler = core_of(llm).scheduler
        # By the caller's id.
        self._entropies: dict[str, list[float]] = {}
        llm.collective_rpc(_tap_worker)
        self._schedule = self._scheduler.schedule
        self._update = self._scheduler.update_from_output
        self._scheduler.schedule = self._scheduling
        self._scheduler.update_from_output = self._updating

    def measure(self, key: str) -> None:
        """Measure the request with this id from now on, until ``take``."""
        self._entropies[key] = []

    def take(self, key: str, num_tokens: int) -> list[float] | None:
        """One entropy per token of a finished request, NaN where there is none.

        Returns:
            None when the request was not measured.
        """
        entropies = self._entropies.pop(key, None)
        if entropies is None:
            return None
        return entropies + [math.nan] * (num_tokens - len(entropies))

    def _scheduling(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        names = [name for name in output.num_scheduled_tokens if caller_id(name) in self._entropies]
        if names:
            setattr(output, wire.PLAN, MeasurePlan(tuple(names), _ANY_TOKEN))
        return output

    def _updating(self, scheduler_output: Any, model_output: Any) -> Any:
        signals: MeasuredSignals | None = getattr(model_output, wire.SIGNALS, None)
        rows = {} if signals is None else signals.by_request()
        requests = self._scheduler.requests
        # A request that ends in this step is gone after it.
        known = {
            name: (requests[name], requests[name].num_output_tokens)
            for name in rows
            if name in requests
        }
        result = self._update(scheduler_output, model_output)
        for name, (request, before) in known.items():
            # One row counts per accepted token: drafts may be refused, and a request in the middle
            # of its prompt has a row and no token.
            entropies = self._entropies.get(caller_id(name))
            if entropies is not None:
                entropies += [math.nan] * (before - len(entropies))
                entropies += rows[name][: request.num_output_tokens - before, 0].tolist()
        return result


def _tap_worker(worker: Any) -> None:
    """Put the tap into a worker; runs in the worker's process."""
    if answers_scheduler(worker.rank, worker.parallel_config):
        put_tap(worker.model_runner, worker.model_config)
