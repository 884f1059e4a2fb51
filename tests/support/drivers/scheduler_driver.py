"""Drives vLLM's real scheduler and KV manager with no model behind them.

Requests carry the lengths of their thought and answer; the driver answers each step with the
tokens such a request would sample. Under async scheduling a step's tokens are handed over only
after the next step was scheduled, as in the engine.
"""

import functools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from meridian_patch.engine import wire
from meridian_patch.engine.early_exit.signals import MeasuredSignals
from meridian_patch.engine.kv_cache.manager import build_phase_kv_cache_manager

BLOCK_SIZE = 32
THINK_START, THINK_END, TURN_END = 256, 257, 259
WORD = 65
# What a step takes, and each of its tokens, on the driver's clock.
STEP_S = 0.01
TOKEN_S = 1e-4


@dataclass(frozen=True)
class Job:
    """One request: its prompt and what it will say.

    Attributes:
        think_tokens: tokens before the end marker; None for a request that does not think.
        opening: the answer's first tokens, where they matter.
        is_closed: whether the end marker stands behind the thought.
        max_tokens: of the output; with fewer than it wants to say it ends by its length.
    """

    request_id: str
    prompt: tuple[int, ...]
    think_tokens: int | None
    answer_tokens: int
    priority: int = 0
    arrival_time: float = 0.0
    opening: tuple[int, ...] = ()
    max_tokens: int = 1500
    is_closed: bool = True

    def token(self, index: int) -> int:
        """The output token at ``index``."""
        thinking = 0 if self.think_tokens is None else self.think_tokens + self.is_closed
        if self.is_closed and index == thinking - 1:
            return THINK_END
        if thinking <= index < thinking + len(self.opening):
            return self.opening[index - thinking]
        return TURN_END if index == thinking + self.answer_tokens else WORD


def make_prompt(rng: random.Random, tokens: int, *, thinks: bool, shared: int = 0) -> list[int]:
    """``tokens`` ids; prompts with the same ``shared`` number begin alike."""
    common = random.Random(shared)
    prefix = [common.randrange(60, 120) for _ in range(tokens // 2)]
    prompt = prefix + [rng.randrange(60, 120) for _ in range(tokens - len(prefix) - 1)]
    return [*prompt, THINK_START if thinks else WORD]


def full_attention(block_size: int = BLOCK_SIZE) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=32, dtype=torch.float32
    )


def aligned_mamba() -> MambaSpec:
    """A recurrent state that is cached at block boundaries."""
    return MambaSpec(
        block_size=BLOCK_SIZE, shapes=((2, 512),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


def sliding_window(window: int, block_size: int = BLOCK_SIZE) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.float32,
        sliding_window=window,
    )


@functools.cache
def engine_config(
    model: Path, *, is_async: bool, blocks: int, mamba_cache_mode: str = "none", **engine_args: Any
) -> Any:
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
    # From 0.33 on vLLM goes by the model alone, and the model here has no such layers.
    config.cache_config.mamba_cache_mode = mamba_cache_mode
    return config


@dataclass
class Driver:
    """One scheduler under test and its pretended model."""

    scheduler: Any
    is_async: bool
    # Steps that stay in flight while the next is scheduled; pipeline stages add to them.
    depth: int = 0
    hash_block_size: int = BLOCK_SIZE
    jobs: dict[str, Job] = field(default_factory=dict)
    # Step index at which each output token of a request was delivered.
    deliveries: dict[str, list[int]] = field(default_factory=dict)
    steps: int = 0
    # Seconds of the virtual clock.
    now_s: float = 0.0
    # Prompt tokens found in the cache, as vLLM's own statistics have it.
    hits: int = 0
    preempted_hits: int = 0
    # KV events, as a subscriber would get them.
    kv_events: list[Any] = field(default_factory=list)
    # Seconds that a step takes longer when any request computes more than one token in it, as where
    # only decodes have a graph of their own.
    prefill_s: float = 0.0
    # What the model's entropies are, of probes too.
    entropy_nats: float = 1.0
    # The probability that it gives to the end of a thought.
    end_prob: float = 0.01
    # Requests and tokens that the scheduler forced, in order.
    forced: list[tuple[str, int]] = field(default_factory=list)
    # Requests that sampled another token, because theirs was left out, in order.
    barred: list[str] = field(default_factory=list)
    _in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)

    @classmethod
    def build(
        cls,
        scheduler_class: type | None,
        config: Any,
        *,
        is_async: bool,
        tiered: bool = False,
        groups: Sequence[KVCacheSpec] = (),
    ) -> "Driver":
        """A driver of ``scheduler_class``, or of the stock class when it is None.

        Args:
            tiered: with our KV cache manager, in the place where the scheduler looks it up.
            groups: of KV cache; block sizes divide BLOCK_SIZE. One of full attention by default.
        """
        blocks = config.cache_config.num_gpu_blocks
        specs = groups or [full_attention()]
        kv_cache_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{n}"], s) for n, s in enumerate(specs)],
        )
        init_none_hash(sha256)
        chosen = scheduler_class or (AsyncScheduler if is_async else Scheduler)
        manager = build_phase_kv_cache_manager(KVCacheManager) if tiered else KVCacheManager
        with patch.object(scheduler_module, "KVCacheManager", manager):
            scheduler = chosen(
                vllm_config=config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_SIZE,
                hash_block_size=(hash_block_size := min(spec.block_size for spec in specs)),
                log_stats=True,
            )
        # An event publisher would open a socket; the driver stands in for it.
        scheduler.kv_event_publisher = driver = cls(
            scheduler, is_async, int(is_async), hash_block_size
        )
        if hasattr(scheduler, "policy_parts"):
            scheduler.clock = lambda: driver.now_s
        return driver

    def add(
        self, job: Job, extra_args: dict[str, Any] | None = None, seed: int | None = None
    ) -> None:
        self.jobs[job.request_id] = job
        self.deliveries[job.request_id] = []
        self.scheduler.add_request(self._request_of(job, extra_args=extra_args, seed=seed))

    def send_chunk(self, job: Job) -> Request:
        """Send a chunk of a streaming session, which the first one opens; the session."""
        self.jobs[job.request_id] = job
        self.deliveries.setdefault(job.request_id, [])
        self.scheduler.add_request(self._request_of(job, resumable=True))
        return self.scheduler.requests[job.request_id]

    def abort(self, request_id: Any) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Schedule one step and deliver the tokens that are due."""
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._run(output)))
        while len(self._in_flight) > self.depth:
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

    def publish(self, batch: Any) -> None:
        """Take the place of vLLM's event publisher."""
        self.kv_events += batch.events

    def _request_of(self, job: Job, *, resumable: bool = False, **sampling: Any) -> Request:
        parameters = SamplingParams(temperature=0, max_tokens=job.max_tokens, **sampling)
        parameters.update_from_generation_config({}, TURN_END)
        return Request(
            request_id=job.request_id,
            prompt_token_ids=list(job.prompt),
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=job.arrival_time,
            priority=job.priority,
            resumable=resumable,
            block_hasher=get_request_block_hasher(self.hash_block_size, sha256),
        )

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in request_ids:
            request = self.scheduler.requests[request_id]
            if request.is_prefill_chunk:
                sampled.append([])
                continue
            index = request.num_computed_tokens - request.num_prompt_tokens
            token = self.jobs[request_id].token(index) if request_id in self.jobs else WORD
            sampled.append([token])
        result = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )
        plan = getattr(output, wire.PLAN, None)
        if plan is not None:
            row = [self.entropy_nats, 5.0, 0.5, self.end_prob]
            values = np.array([row] * len(plan.request_ids), np.float32)
            setattr(result, wire.SIGNALS, MeasuredSignals(plan.request_ids, None, values))
        return self._force(output, result)

    def _force(self, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """Sample what the scheduler's bit masks leave: one token, or all but some."""
        grammar = self.scheduler.get_grammar_bitmask(output)
        if grammar is not None:
            for name, row in zip(
                grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True
            ):
                bits = np.unpackbits(row.view(np.uint8), bitorder="little")
                sampled = result.sampled_token_ids[result.req_id_to_index[name]]
                if bits.sum() == 1:
                    sampled[:] = np.flatnonzero(bits).tolist()
                    self.forced += [(name, token) for token in sampled]
                elif not bits[sampled[0]]:
                    sampled[0] = WORD
                    self.barred.append(name)
        return result

    def _deliver(self) -> None:
        output, result = self._in_flight.popleft()
        self.now_s += STEP_S + TOKEN_S * output.total_num_scheduled_tokens
        if output.total_num_scheduled_tokens > len(output.num_scheduled_tokens):
            self.now_s += self.prefill_s
        for engine_outputs in self.scheduler.update_from_output(output, result).values():
            if engine_outputs.scheduler_stats is not None:
                found = engine_outputs.scheduler_stats.prefix_cache_stats
                self.hits += found.hits
                self.preempted_hits += found.preempted_hits
            for item in engine_outputs.outputs:
                self.deliveries[item.request_id] += [self.steps] * len(item.new_token_ids)
