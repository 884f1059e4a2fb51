"""Drives vLLM's real scheduler and KV manager with no model behind them.

Requests carry the lengths of their thought and answer; the driver answers each step with the
tokens such a request would sample. Under async scheduling a step's tokens are handed over only
after the next step was scheduled, as in the engine.
"""

import functools
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 32
THINK_START, THINK_END, TURN_END = 256, 257, 259
WORD = 65


@dataclass(frozen=True)
class Job:
    """One request: its prompt and what it will say.

    Attributes:
        think_tokens: tokens before the end marker; None for a request that does not think.
    """

    request_id: str
    prompt: tuple[int, ...]
    think_tokens: int | None
    answer_tokens: int
    priority: int = 0
    arrival_time: float = 0.0

    def token(self, index: int) -> int:
        """The output token at ``index``."""
        thinking = 0 if self.think_tokens is None else self.think_tokens + 1
        if index == thinking - 1:
            return THINK_END
        return TURN_END if index == thinking + self.answer_tokens else WORD


def make_prompt(rng: random.Random, tokens: int, *, thinks: bool, shared: int = 0) -> list[int]:
    """``tokens`` ids; prompts with the same ``shared`` number begin alike."""
    common = random.Random(shared)
    prefix = [common.randrange(60, 120) for _ in range(tokens // 2)]
    prompt = prefix + [rng.randrange(60, 120) for _ in range(tokens - len(prefix) - 1)]
    return [*prompt, THINK_START if thinks else WORD]


@functools.cache
def engine_config(model: Path, *, is_async: bool, blocks: int, **engine_args: Any) -> Any:
    """A VllmConfig for the scheduler alone."""
    settings = {
        "model": str(model),
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": BLOCK_SIZE,
        "dtype": "float32",
        "enforce_eager": True,
        **engine_args,
    }
    config = EngineArgs(**settings).create_engine_config()
    # The CPU platform turns async scheduling off; the scheduler itself does not mind.
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = blocks
    return config


@dataclass
class Driver:
    """One scheduler under test and its pretended model."""

    scheduler: Any
    is_async: bool
    jobs: dict[str, Job] = field(default_factory=dict)
    # Step index at which each output token of a request was delivered.
    deliveries: dict[str, list[int]] = field(default_factory=dict)
    steps: int = 0
    _in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)

    @classmethod
    def build(cls, scheduler_class: type | None, config: Any, *, is_async: bool) -> "Driver":
        """A driver of ``scheduler_class``, or of the stock class when it is None."""
        blocks = config.cache_config.num_gpu_blocks
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        kv_cache_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        init_none_hash(sha256)
        chosen = scheduler_class or (AsyncScheduler if is_async else Scheduler)
        scheduler = chosen(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        return cls(scheduler, is_async)

    def add(self, job: Job) -> None:
        self.jobs[job.request_id] = job
        self.deliveries[job.request_id] = []
        parameters = SamplingParams(temperature=0, max_tokens=1500)
        parameters.update_from_generation_config({}, TURN_END)
        self.scheduler.add_request(
            Request(
                request_id=job.request_id,
                prompt_token_ids=list(job.prompt),
                sampling_params=parameters,
                pooling_params=None,
                arrival_time=job.arrival_time,
                priority=job.priority,
                block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
            )
        )

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Schedule one step and deliver the tokens that are due."""
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._run(output)))
        while len(self._in_flight) > int(self.is_async):
            self._deliver()
        self.steps += 1
        return output

    def drain(self, limit: int = 20_000) -> None:
        """Step until nothing is left."""
        while self.scheduler.has_unfinished_requests():
            if limit == 0:
                raise AssertionError("the scheduler does not finish")
            limit -= 1
            self.step()
        while self._in_flight:
            self._deliver()

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in request_ids:
            request = self.scheduler.requests[request_id]
            if request.is_prefill_chunk:
                sampled.append([])
                continue
            index = request.num_computed_tokens - request.num_prompt_tokens
            sampled.append([self.jobs[request_id].token(index)])
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )

    def _deliver(self) -> None:
        output, result = self._in_flight.popleft()
        for engine_outputs in self.scheduler.update_from_output(output, result).values():
            for item in engine_outputs.outputs:
                self.deliveries[item.request_id] += [self.steps] * len(item.new_token_ids)
