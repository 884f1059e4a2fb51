"""One engine and its API server in one process, whose telemetry is switched on and off by step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from prometheus_client import REGISTRY
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, output_processor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from meridian_patch.engine.api.phase_times import follow_outputs
from meridian_patch.engine.api.request_state import build_request_state
from meridian_patch.engine.api.stat_logger import build_prometheus_stat_logger
from meridian_patch.engine.api.tracing import build_output_processor
from meridian_patch.engine.scheduler import phase_part
from meridian_patch.patching.candidate import MARK
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.types import ReplayRequest
from micro.timing import Seconds, time_calls

ON, OFF = "on", "off"
_ATTACH = "attach_changes"
CORE, WIRE, SERVER = "EngineCore", "wire", "API server"


@contextmanager
def patched_api() -> Iterator[None]:
    """VLLM's output processor and request states with ours in their place."""
    names = {"RequestState": build_request_state, "OutputProcessor": build_output_processor}
    originals = {name: getattr(output_processor, name) for name in names}
    built = {name: build(originals[name]) for name, build in names.items()}
    for name, ours in built.items():
        setattr(ours, MARK, name)
        setattr(output_processor, name, ours)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(output_processor, name, original)


class SwitchedEngine:
    """A replayed engine whose outputs go over the wire to vLLM's output processor and metrics.

    With telemetry off, stock's own methods run in the timed parts. What later steps need is done
    all the same, untimed, so that both kinds of steps have equal work.

    Args:
        engine: with our scheduler.
        draw: the next request, by its number.
        count: requests at a time.
    """

    def __init__(
        self, engine: ReplayEngine, draw: Callable[[int], ReplayRequest], count: int
    ) -> None:
        self._engine = engine
        self._draw = draw
        self._drawn = 0
        self._seconds: Seconds = {}
        self._is_on = True
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        ours = output_processor.OutputProcessor
        self._stock_processor = ours.__mro__[1]
        self._processor = ours(None, log_stats=True)
        stock = next(c for c in PrometheusStatLogger.__mro__ if c.__module__.startswith("vllm."))
        self._stock_logger = stock
        self._logger = build_prometheus_stat_logger(stock)(engine.scheduler.vllm_config)
        scheduler = engine.scheduler
        self._make_stats = scheduler.make_stats
        self._attached_s = 0.0
        self._attach = getattr(phase_part, _ATTACH)
        time_calls(phase_part, _ATTACH, self._attached)
        for name in ("schedule", "update_from_output"):
            time_calls(scheduler, name, partial(self._add, CORE))
        self._update, scheduler.update_from_output = scheduler.update_from_output, self._deliver
        self.add(count)

    def close(self) -> None:
        """Restore what is timed outside of the engine, and take its metrics off the registry."""
        setattr(phase_part, _ATTACH, self._attach)
        for collector in list(REGISTRY._collector_to_names):
            if getattr(collector, "_name", "").startswith(("meridian_", "vllm:")):
                REGISTRY.unregister(collector)

    def add(self, count: int) -> None:
        """Add so many requests to the engine and to the API server."""
        for number in range(self._drawn, self._drawn + count):
            request = self._draw(number)
            self._engine.add(request, self._engine.now)
            kind = RequestOutputKind.DELTA
            made = EngineCoreRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt,
                mm_features=None,
                sampling_params=SamplingParams(output_kind=kind, detokenize=False),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            made.external_req_id = request.request_id
            queue = output_processor.RequestOutputCollector(kind, request.request_id)
            self._processor.add_request(made, None, None, 0, queue)
        self._drawn += count

    def step(self, *, is_on: bool) -> Seconds:
        """One step of engine and API server; CPU seconds by process."""
        self._seconds.clear()
        self._attached_s = 0.0
        self._switch(is_on=is_on)
        self._engine.step()
        self.add(len(self._engine.take_finished()))
        if not is_on:
            self._add(CORE, -self._attached_s)
        return dict(self._seconds)

    def _switch(self, *, is_on: bool) -> None:
        self._is_on = is_on
        scheduler = self._engine.scheduler
        counters = vars(scheduler.phase_counters)
        for name in ("count", "spend"):
            counters.pop(name, None)
            if not is_on:
                counters[name] = _nothing
        stock: Any = AsyncScheduler
        scheduler.make_stats = self._make_stats if is_on else partial(stock.make_stats, scheduler)

    def _deliver(self, *args: Any) -> Any:
        results = self._update(*args)
        for client in results.values():
            start = time.thread_time()
            arrived = self._decoder.decode(self._encoder.encode(client))
            self._add(WIRE, time.thread_time() - start)
            self._serve(arrived)
        return results

    def _serve(self, arrived: Any) -> None:
        """What the API server's output handler does with one step's outputs."""
        processor, stats = self._processor, IterationStats()
        take, end, record = (
            processor.process_outputs,
            type(processor)._update_stats_from_finished,
            self._logger.record,
        )
        # Upstream forgets the states of requests that end.
        states = dict(processor.request_states)
        if not self._is_on:
            stock, logger = self._stock_processor, self._stock_logger
            take = partial(stock.process_outputs, processor)
            end = stock._update_stats_from_finished
            record = partial(logger.record, self._logger)
        processor._update_stats_from_finished = partial(end, processor)
        start = time.thread_time()
        take(arrived.outputs, arrived.timestamp, stats)
        record(arrived.scheduler_stats, stats)
        self._add(SERVER, time.thread_time() - start)
        if not self._is_on:
            # Behind the timed part, which must not find in the caches what this reads.
            follow_outputs(states, arrived.outputs, arrived.timestamp, IterationStats())

    def _attached(self, seconds: float) -> None:
        self._attached_s += seconds

    def _add(self, process: str, seconds: float) -> None:
        self._seconds[process] = self._seconds.get(process, 0.0) + seconds


def _nothing(*_: Any) -> None:
    pass
