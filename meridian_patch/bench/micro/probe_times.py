"""Times what one probe adds to a step, by its context, without a model."""

import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker import worker_base

from meridian_patch.engine.early_exit.signals import PLAN_FIELD, SIGNALS_FIELD, Signals
from meridian_patch.exit.actions import Probe
from meridian_patch.patching.candidate import MARK
from meridian_patch.replay.scheduler import build_scheduler, read_markers
from meridian_patch.replay.types import EngineLimits, ReplayArm

# What is timed; the last is what either model runner does with a new request's tokens.
CALLS = ("schedule", "pickle", "unpickle", "update_from_output", "token row")
_SETTINGS = {
    "EXIT__MODE": "observe",
    # No probe but those that are asked for here.
    "EXIT__PROBE_MIN_GAP_TOKENS": "1000000",
    "EXIT__PROBE_MAX_GAP_TOKENS": "1000000",
    "EXIT__PROBE_EVERY_STEPS": "1",
    "POLICY__TIME_BUDGET_US": "10000000",
}
_SETTLING_STEPS = 5
# A word, which ends nothing.
_WORD = 65

Seconds = dict[str, float]


class ProbeMicro:
    """One thinker on a scheduler of its own, probed in every second step.

    Args:
        most_tokens: longest context that will be measured.
        is_v2: the scheduler speaks to model runner V2.
    """

    def __init__(self, most_tokens: int, *, is_v2: bool) -> None:
        self._row = np.zeros(2 * most_tokens, np.int32)
        limits = EngineLimits(max_model_len=2 * most_tokens, max_num_batched_tokens=2 * most_tokens)
        self._hasher = get_request_block_hasher(limits.block_size, sha256)
        settings = {f"MERIDIAN_PATCH_SET_{name}": value for name, value in _SETTINGS.items()}
        arm = ReplayArm("probed", is_patched=True, settings=settings)
        blocks = 4 * most_tokens // limits.block_size
        with _measuring_workers():
            self._scheduler = build_scheduler(arm, blocks, is_async=True, limits=limits)
        self._scheduler.use_v2_model_runner = is_v2

    def measure(self, context_tokens: int, rounds: int) -> Iterator[tuple[Seconds, Seconds]]:
        """CPU seconds of each call, of a step without a probe and of the next one, with it."""
        scheduler = self._scheduler
        thinker = self._thinker(context_tokens)
        scheduler.add_request(thinker)
        for _ in range(_SETTLING_STEPS):
            self._step()
        for _ in range(rounds):
            plain = self._step()
            scheduler.early_exit.probes.ask(thinker, Probe(1, 1), thinker.num_tokens - 1)
            yield plain, self._step()
        scheduler.finish_requests(thinker.request_id, RequestStatus.FINISHED_ABORTED)
        self._step()

    def _thinker(self, tokens: int) -> Request:
        rng, markers = random.Random(tokens), read_markers()
        prompt = [rng.randrange(60, 120) for _ in range(tokens - 1)]
        parameters = SamplingParams(temperature=0, max_tokens=tokens)
        parameters.update_from_generation_config({}, markers.turn_end)
        return Request(
            f"thinker{tokens}",
            [*prompt, markers.think_start],
            parameters,
            None,
            block_hasher=self._hasher,
        )

    def _step(self) -> Seconds:
        seconds: Seconds = {}

        def timed(call: str, function: Callable[..., Any], *args: Any) -> Any:
            start = time.thread_time()
            result = function(*args)
            seconds[call] = time.thread_time() - start
            return result

        output = timed("schedule", self._scheduler.schedule)
        sent = timed("pickle", pickle.dumps, output, pickle.HIGHEST_PROTOCOL)
        timed("unpickle", pickle.loads, sent)
        timed("token row", self._write_rows, output)
        timed("update_from_output", self._scheduler.update_from_output, output, _answer(output))
        return seconds

    def _write_rows(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._row[: len(new.prompt_token_ids)] = new.prompt_token_ids


def _answer(output: Any) -> ModelRunnerOutput:
    names = list(output.num_scheduled_tokens)
    index = {name: number for number, name in enumerate(names)}
    answer = ModelRunnerOutput(names, index, sampled_token_ids=[[_WORD] for _ in names])
    plan = getattr(output, PLAN_FIELD, None)
    if plan is not None:
        values = np.ones((len(plan.request_ids), 4), np.float32)
        setattr(answer, SIGNALS_FIELD, Signals(plan.request_ids, None, values))
    return answer


@contextmanager
def _measuring_workers() -> Iterator[None]:
    """As if the workers were patched: this bench answers in their place."""
    if hasattr(worker_base.WorkerBase, MARK):
        yield
        return
    setattr(worker_base.WorkerBase, MARK, "probe-micro")
    try:
        yield
    finally:
        delattr(worker_base.WorkerBase, MARK)
