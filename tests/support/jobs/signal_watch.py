"""Asks an in-process engine for signals, and computes the same from the logits vLLM returns."""

from collections import defaultdict

import numpy as np
from engine_watch import request_name

# Named here: importing the package before vLLM has loaded its plug-ins would patch stock engines.
PLAN_FIELD, SIGNALS_FIELD = "meridian_plan", "meridian_signals"


class SignalWatch:
    """Plans the measuring of every row while ``is_on`` and keeps what comes back.

    Attributes:
        is_on: plans are made.
        per_token: request name -> signals of its accepted tokens, in order.
        outputs: model outputs seen with tokens in them.
        bare: those of them without signals.
        surplus: rows measured beyond the tokens accepted.
        short: requests of an output with more tokens than rows.
    """

    def __init__(self, scheduler, boundary_id: int) -> None:
        self.restart()
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def schedule_and_plan(*args, **kwargs):
            output = schedule(*args, **kwargs)
            if self.is_on:
                from meridian_patch.engine.early_exit.signals import MeasurePlan

                wanted = (*output.num_scheduled_tokens, "unknown")
                setattr(output, PLAN_FIELD, MeasurePlan(wanted, boundary_id))
            return output

        def look_and_update(scheduler_output, model_output, *args, **kwargs):
            self._look(model_output)
            return update(scheduler_output, model_output, *args, **kwargs)

        scheduler.schedule, scheduler.update_from_output = schedule_and_plan, look_and_update

    def restart(self, *, is_on: bool = False) -> None:
        self.is_on = is_on
        self.per_token = defaultdict(list)
        self.outputs = self.bare = self.surplus = self.short = 0

    def report(self) -> dict:
        counts = {name: getattr(self, name) for name in ("outputs", "bare", "surplus", "short")}
        return counts | {"per_token": dict(self.per_token)}

    def _look(self, model_output) -> None:
        if not any(model_output.sampled_token_ids):
            return
        self.outputs += 1
        signals = getattr(model_output, SIGNALS_FIELD, None)
        if signals is None:
            self.bare += 1
            return
        signals = signals.by_request()
        for request_id, index in model_output.req_id_to_index.items():
            n_tokens = len(model_output.sampled_token_ids[index])
            rows = signals[request_id]
            self.short += n_tokens > len(rows)
            self.surplus += len(rows) - n_tokens
            self.per_token[request_name(request_id)] += rows[:n_tokens].tolist()


def tapped(worker) -> list[str]:
    """What of the worker's model runner the tap has changed in order to see logits."""
    runner = worker.model_runner
    samplers = [runner.sampler, getattr(runner, "rejection_sampler", None)]
    names = [*vars(runner), *(type(sampler).__name__ for sampler in samplers)]
    return [name for name in names if name == "_sample" or "Tapped" in name]


def signals_of(logits: dict, boundary_id: int) -> list[float]:
    """The four signals in float64, from one token's logits as vLLM returns them, by token id."""
    x = np.array([each.logprob for each in logits.values()], np.float64)
    at_boundary = logits[boundary_id].logprob
    top = x.max()
    e = np.exp(x - top)
    total = e.sum()
    p = e / total
    log_p = np.log(p, where=p > 0, out=np.zeros_like(p))
    entropy = -(p * log_p).sum()
    boundary = np.exp(at_boundary - top) / total
    return [float(v) for v in (entropy, top + np.log(total), p.max(), boundary)]
