"""Drives vLLM's real scheduler on a virtual clock; requests bring the tokens to sample."""

import copy
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from meridian_patch.engine import wire
from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.errors import BenchError
from meridian_patch.phase.tracker import Phase
from meridian_patch.replay.accounting import InfiniteCache, RecomputedTokens
from meridian_patch.replay.cost import CostModel
from meridian_patch.replay.offload import KV_BYTES_PER_TOKEN, OffloadTier
from meridian_patch.replay.scheduler import build_scheduler, disabled_logging
from meridian_patch.replay.signals import made_up_signals
from meridian_patch.replay.step_log import step_work
from meridian_patch.replay.types import (
    EngineLimits,
    ReplayArm,
    ReplayRecord,
    ReplayRequest,
    ReplayTotals,
    StepWork,
    TemplateTokens,
)


class ReplayEngine:
    """One scheduler under test and a simulated model.

    Under async scheduling a step's tokens are handed over only after the next step was scheduled,
    as in the engine. Measure plans and probes are answered with made-up signals; their steps take
    the time of their tokens. No thought is closed: sampled tokens are always the request's.

    Args:
        graphs: says which steps a captured graph runs, and how long the others are launched.

    Attributes:
        now: the virtual clock, in seconds; a caller may set it forward while idle.
        totals: sums since the start.
    """

    def __init__(
        self,
        arm: ReplayArm,
        blocks: int,
        step_seconds: Callable[[StepWork], float],
        template: TemplateTokens,
        *,
        is_async: bool = True,
        limits: EngineLimits | None = None,
        graphs: CostModel | None = None,
    ) -> None:
        limits = limits or EngineLimits()
        self.now = 0.0
        self.totals = ReplayTotals()
        self.scheduler = build_scheduler(arm, blocks, is_async=is_async, limits=limits)
        manager = self.scheduler.kv_cache_manager
        if hasattr(manager, "clock"):
            manager.clock = lambda: self.now
        # Ours has a clock, and one that an arm builds may have one.
        if hasattr(self.scheduler, "clock"):
            self.scheduler.clock = lambda: self.now
        self._offload = None
        if arm.offload_gb_per_s is not None:
            self._offload = OffloadTier(self.scheduler, arm.offload_gb_per_s, KV_BYTES_PER_TOKEN)
        self._is_async = is_async
        self._step_seconds = step_seconds
        self._graphs = graphs
        if graphs and hasattr(self.scheduler, "policy_parts"):
            self.scheduler.policy_parts.model.graph_tokens = graphs.graph_tokens
        self._hasher = get_request_block_hasher(limits.block_size, sha256)
        self._sampling = SamplingParams(temperature=0, max_tokens=limits.max_model_len)
        self._sampling.update_from_generation_config({}, template.turn_end)
        self._live: dict[str, tuple[Request, ReplayRecord]] = {}
        # The tokens that each of them will sample; a record makes them anew from two properties.
        self._outputs: dict[str, list[int]] = {}
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._finished: list[ReplayRecord] = []
        self._infinite = InfiniteCache()
        self._recomputed = RecomputedTokens()

    @property
    def is_idle(self) -> bool:
        """No request waits or runs, and no step or copy is under way."""
        is_copying = self._offload is not None and self._offload.is_busy
        return not self._live and not self._in_flight and not is_copying

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that requests hold; blocks that are only cached count as free."""
        return self.scheduler.kv_cache_manager.usage

    @property
    def num_waiting(self) -> int:
        """Requests that are in but not running, the preempted ones included."""
        return len(self._live) - self.running_phases().total()

    def running_phases(self) -> Counter[Phase]:
        """Running requests by phase."""
        running = (request.request_id for request in self.scheduler.running)
        return Counter(self._live[name][1].phase for name in running if name in self._live)

    def forget(self, request_id: str) -> None:
        """Forget a request that a caller aborted."""
        self._live.pop(request_id, None)
        self._outputs.pop(request_id, None)
        self._recomputed.forget(request_id)

    def counters(self) -> dict[str, int]:
        """What a patched scheduler counted since the start; empty for stock."""
        counted = getattr(self.scheduler, "phase_counters", None)
        return dict(sorted(counted.totals.items())) if counted else {}

    def add(
        self, request: ReplayRequest, arrival_s: float, vllm_xargs: dict[str, Any] | None = None
    ) -> None:
        """Submit a request; ``arrival_s`` is not after ``now``."""
        sampling = self._sampling
        if request.max_tokens is not None or vllm_xargs:
            sampling = copy.copy(sampling)
            sampling.max_tokens = request.max_tokens or sampling.max_tokens
            sampling.extra_args = vllm_xargs
        upstream = Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=arrival_s,
            block_hasher=self._hasher,
        )
        record = ReplayRecord(request, arrival_s)
        self._live[request.request_id] = (upstream, record)
        self._outputs[request.request_id] = request.output
        self.scheduler.add_request(upstream)

    def step(self) -> StepWork:
        """Schedule one step, let its time pass, and deliver the tokens that are due.

        Raises:
            BenchError: nothing can be scheduled any more although requests wait.
        """
        output = self.scheduler.schedule()
        if not output.num_scheduled_tokens and not self._in_flight:
            self._wait_for_copies()
        self._note_admissions(output)
        work, result = self._run(output)
        seconds = self._step_seconds(work)
        if self._offload is not None:
            seconds += self._offload.run(output, result, self.now, seconds)
            self.totals.reloaded_tokens = self._offload.reloaded_tokens
        self.totals.steps += 1
        self._in_flight.append((output, result))
        if self._is_async:
            launch_s = self._graphs.launch_seconds(work) if self._graphs else 0.0
            if launch_s:
                # The engine waits for no output while it launches kernels.
                self.now += launch_s
                self.scheduler.get_grammar_bitmask(output)
            self._deliver_down_to(1 if output.num_scheduled_tokens else 0)
            self.now += seconds - launch_s
        else:
            self.now += seconds
            self._deliver_down_to(0)
        return work

    def reset_prefix_cache(self) -> None:
        """Forget all that is cached; called while idle."""
        with disabled_logging(logging.INFO):
            self.scheduler.reset_prefix_cache()

    def take_finished(self) -> list[ReplayRecord]:
        """Records of the requests that finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _wait_for_copies(self) -> None:
        # Requests that arrive meanwhile are admitted after the copy: late by one copy at most.
        if self._offload is not None and self._offload.is_copying:
            self.now = self._offload.next_done_s(self.now)
        elif self._live:
            raise BenchError(
                f"the scheduler is stuck with {len(self._live)} requests: one of them needs more "
                "KV blocks than the pool holds; give a larger --pool"
            )

    def _note_admissions(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            if new.req_id not in self._live:
                # A probe.
                continue
            request, record = self._live[new.req_id]
            record.admitted_s = self.now
            record.hit_tokens = new.num_computed_tokens
            record.bound_tokens = self._infinite.hit_tokens(
                request.block_hashes, request.num_tokens
            )
            self._infinite.add(request.block_hashes, request.num_tokens)
        for request_id in (output.preempted_req_ids or set()) & self._live.keys():
            request, record = self._live[request_id]
            self.totals.preemptions += 1
            record.preemptions[record.phase] += 1
            self._recomputed.preempted(request_id, request.num_tokens)

    def _run(self, output: Any) -> tuple[StepWork, ModelRunnerOutput]:
        work = step_work(output.num_scheduled_tokens, self.scheduler.requests)
        request_ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        live, now = self._live, self.now
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if request_id not in live:
                sampled.append(self._sample_of_probe(request_id))
                continue
            request, record = live[request_id]
            computed, is_chunk = request.num_computed_tokens, request.is_prefill_chunk
            if self._recomputed.has_open or is_chunk:
                again = self._recomputed.ran(
                    request_id, computed - scheduled, computed, is_prefill_chunk=is_chunk
                )
                if again:
                    record.recomputed_tokens[record.phase] += again
            if record.scheduled_s is not None and now - record.scheduled_s > record.longest_pause_s:
                record.longest_pause_s = now - record.scheduled_s
            record.scheduled_s = now
            if is_chunk:
                sampled.append([])
                continue
            tokens = self._outputs[request_id]
            # Under async scheduling one more token is sampled before the stop is seen.
            index = min(computed - request.num_prompt_tokens, len(tokens) - 1)
            sampled.append([tokens[index]])
        positions = {request_id: index for index, request_id in enumerate(request_ids)}
        result = ModelRunnerOutput(
            req_ids=request_ids, req_id_to_index=positions, sampled_token_ids=sampled
        )
        plan = getattr(output, wire.PLAN, None)
        if plan is not None:
            signals = made_up_signals(plan.request_ids, self.scheduler.requests)
            setattr(result, wire.SIGNALS, signals)
        return work, result

    def _sample_of_probe(self, request_id: str) -> list[int]:
        request = self.scheduler.requests[request_id]
        assert isinstance(request, ProbeRequest)
        return [] if request.is_prefill_chunk else [0]

    def _deliver_down_to(self, steps_in_flight: int) -> None:
        while len(self._in_flight) > steps_in_flight:
            output, result = self._in_flight.popleft()
            for engine_outputs in self.scheduler.update_from_output(output, result).values():
                self._note_statistics(engine_outputs.scheduler_stats)
                for item in engine_outputs.outputs:
                    self._note_output(item)

    def _note_output(self, item: Any) -> None:
        request, record = self._live[item.request_id]
        record.token_s.extend([self.now] * len(item.new_token_ids))
        if item.finish_reason is not None:
            record.finish_reason = str(item.finish_reason)
            # Load-bearing: the last sampled token was never fed to the model.
            self._infinite.add(request.block_hashes, request.num_tokens - 1)
            self._recomputed.forget(item.request_id)
            self.totals.recomputed_tokens = self._recomputed.total
            del self._live[item.request_id], self._outputs[item.request_id]
            self._finished.append(record)

    def _note_statistics(self, stats: Any) -> None:
        if stats is not None and stats.prefix_cache_stats is not None:
            self.totals.engine_hits += stats.prefix_cache_stats.hits
            self.totals.engine_queries += stats.prefix_cache_stats.queries
