"""One replay, from a trace to its figures, and many of them in worker processes."""

import multiprocessing
import signal
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from meridian_patch.bench.figure_table import Figures
from meridian_patch.bench.simulated.arms import arm_settings
from meridian_patch.bench.simulated.metrics import (
    GAP_BORDERS_S,
    AloneTimes,
    PerRequest,
    StepTimes,
    answer_gaps,
    per_request,
    run_figures,
)
from meridian_patch.bench.simulated.source import TraceSource, session_bounds
from meridian_patch.bench.simulated.trace import History, TraceRequest, read_trace
from meridian_patch.bench.simulated.workloads import WORKLOADS, draw_trace
from meridian_patch.errors import BenchError, MeridianError
from meridian_patch.phase.tracker import Phase
from meridian_patch.replay.cost import load_cost
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.player import play
from meridian_patch.replay.scheduler import (
    BLOCK_SIZE,
    MAX_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    read_template_tokens,
)
from meridian_patch.replay.types import ReplayArm, StepWork

# Virtual seconds between two points of a timeline.
_TIMELINE_S = 0.1
_DIED = (
    "a worker process died in the middle of a replay, most likely for want of memory (about 1 GiB "
    "each); give fewer --workers"
)
Key = TypeVar("Key")
Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Offer:
    """The requests of a comparison: a drawn workload, or a trace file.

    Attributes:
        workload: its name; of a trace, the name of its file.
        requests: number to draw; not used for a trace.
        trace: file, or None to draw.
        history: of a trace; a workload has its own.
    """

    workload: str
    requests: int = 0
    trace: Path | None = None
    history: History = History.STRIPPED

    @property
    def thinking(self) -> History:
        """Which earlier thoughts later prompts contain."""
        return self.history if self.trace else WORKLOADS[self.workload].history

    def load(self, seed: int, rate_per_s: float | None) -> list[TraceRequest]:
        """The requests of a seed at a rate; arrivals of a trace are stretched to the rate.

        Raises:
            BenchError: the trace file is unreadable or wrong.
        """
        if self.trace is None:
            return draw_trace(self.workload, self.requests, rate_per_s or 1.0, seed)
        trace = read_trace(self.trace)
        last_s = max(request.arrival_s or 0.0 for request in trace)
        if rate_per_s is None or last_s == 0:
            return trace
        return [_moved(request, len(trace) / last_s / rate_per_s) for request in trace]


@dataclass(frozen=True)
class ReplayJob:
    """One replay; picklable, so that a worker process can run it.

    Attributes:
        rate_per_s: requests per second; None leaves a trace's arrivals as they are.
        pool_tokens: size of the KV pool; None for a pool in which no request waits for KV blocks.
        cost: name or path of a cost model.
        offload_gb_per_s: bandwidth at which lost KV is reloaded; None: it is computed again.
        is_saturated: all requests arrive at once, and sessions do not pause.
        has_timeline: sample what was running over time.
    """

    offer: Offer
    seed: int
    arm: ReplayArm
    rate_per_s: float | None
    pool_tokens: int | None
    cost: str
    offload_gb_per_s: float | None = None
    is_saturated: bool = False
    has_timeline: bool = False

    def trace(self) -> list[TraceRequest]:
        """The requests with the arrival times of this replay."""
        trace = self.offer.load(self.seed, self.rate_per_s)
        return [_moved(request, 0.0) for request in trace] if self.is_saturated else trace


@dataclass(frozen=True)
class Timeline:
    """State of the engine, sampled over the virtual clock; arrays of equal length.

    Attributes:
        running: running requests by phase.
        kv_usage: share of the KV pool, 0 to 1.
    """

    at_s: NDArray[np.float64]
    waiting: NDArray[np.int64]
    running: Mapping[Phase, NDArray[np.int64]]
    kv_usage: NDArray[np.float64]


@dataclass(frozen=True)
class ReplayRun:
    """Figures of one replay.

    Attributes:
        gap_counts: histogram of the answer gaps with the borders ``GAP_BORDERS_S``.
        kv_p99_tokens: p99 over the steady time of the KV tokens that requests held.
        counters: counts of the patched scheduler; empty for stock.
        wall_s: real time of the replay.
    """

    figures: Figures
    requests: PerRequest
    gap_counts: NDArray[np.int64]
    kv_p99_tokens: float
    counters: Mapping[str, int]
    wall_s: float
    timeline: Timeline | None = None


class _Recorder:
    """Records each step of an engine."""

    def __init__(self, engine: ReplayEngine, *, has_timeline: bool) -> None:
        self._engine = engine
        self._next_s = 0.0 if has_timeline else np.inf
        self._steps = [array("d") for _ in range(4)]
        self._points: list[tuple[float, ...]] = []

    def note(self, work: StepWork, seconds: float) -> None:
        engine = self._engine
        usage = engine.kv_usage
        row = (engine.now, seconds, work.prefill_tokens, usage)
        for column, value in zip(self._steps, row, strict=True):
            column.append(value)
        if engine.now >= self._next_s:
            self._next_s = engine.now + _TIMELINE_S
            phases = engine.running_phases()
            counts = (phases[phase] for phase in Phase)
            self._points.append((engine.now, usage, engine.num_waiting, *counts))

    def step_times(self) -> StepTimes:
        end_s, seconds, prefill, usage = (np.array(column) for column in self._steps)
        return StepTimes(end_s, seconds, prefill.astype(np.int64), usage)

    def timeline(self) -> Timeline | None:
        if not self._points:
            return None
        at_s, usage, waiting, *counts = np.array(self._points).T
        running = {p: c.astype(np.int64) for p, c in zip(Phase, counts, strict=True)}
        return Timeline(at_s, waiting.astype(np.int64), running, usage)


def run_job(job: ReplayJob) -> ReplayRun:
    """Replay one job from start to end.

    Raises:
        BenchError: trace or cost model cannot be loaded, or the pool cannot hold one request.
        ConfigError: the arm sets something that does not exist.
    """
    started = time.perf_counter()
    trace, history = job.trace(), job.offer.thinking
    check_pool(job, trace)
    cost, template = load_cost(job.cost), read_template_tokens()
    pool = job.pool_tokens or _ample_tokens(trace, history)
    arm = replace(job.arm, settings=arm_settings(job.arm, history))
    if job.offload_gb_per_s is not None:
        arm = replace(arm, offload_gb_per_s=job.offload_gb_per_s)
    engine = ReplayEngine(arm, pool // BLOCK_SIZE, cost.step_seconds, template, graphs=cost)
    recorder = _Recorder(engine, has_timeline=job.has_timeline)
    source = TraceSource(trace, template, history, job.seed)
    records = play(engine, source, on_step=recorder.note)
    requests = per_request(records, AloneTimes(cost.step_seconds, MAX_BATCHED_TOKENS))
    gaps, steps = answer_gaps(records), recorder.step_times()
    figures = run_figures(records, requests, gaps, steps)
    return ReplayRun(
        figures,
        requests,
        np.histogram(np.clip(gaps, GAP_BORDERS_S[0], GAP_BORDERS_S[-1]), GAP_BORDERS_S)[0],
        (figures["steady_kv_usage_p99"] or 0.0) * pool,
        engine.counters(),
        time.perf_counter() - started,
        recorder.timeline(),
    )


def check_pool(job: ReplayJob, trace: Sequence[TraceRequest]) -> None:
    """Refuse a pool that cannot hold each request: it would be preempted and resumed for ever.

    Raises:
        BenchError: names the smallest pool that can.
    """
    if job.pool_tokens is None:
        return
    # Asynchronous scheduling schedules one token more before it sees the stop.
    longest = max(session_bounds(trace, job.offer.thinking)) + 1
    needed = -(-longest // BLOCK_SIZE) * BLOCK_SIZE
    if job.pool_tokens < needed:
        raise BenchError(
            f"the KV pool is {job.pool_tokens} tokens, expected at least {needed}: the longest "
            f"request of {job.offer.workload}, seed {job.seed}, must fit; give a larger --pool or "
            "--kv-cap"
        )


def _ample_tokens(trace: Sequence[TraceRequest], history: History) -> int:
    """Tokens of the longest requests of as many sessions as can run at once."""
    longest = sorted(session_bounds(trace, history))
    # The last block of each may be nearly empty, and asynchronous scheduling needs one token more.
    return sum(tokens + 2 * BLOCK_SIZE for tokens in longest[-MAX_NUM_SEQS:])


def _moved(request: TraceRequest, factor: float) -> TraceRequest:
    if request.arrival_s is None:
        return replace(request, pause_s=request.pause_s if factor else 0.0)
    return replace(request, arrival_s=request.arrival_s * factor)


class Workers:
    """A pool of processes for several calls of ``run``; leaving the context ends it."""

    def __init__(self, processes: int) -> None:
        # Spawned, not forked: vLLM starts threads when it is imported.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, initializer=_ignore_interrupts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:
            # Without this the exit of the process waits for the replays that still run.
            for child in multiprocessing.active_children():
                child.terminate()

    def run(self, jobs: Mapping[Key, ReplayJob]) -> Iterator[tuple[Key, ReplayRun | str]]:
        """Replay all jobs; yields each as it ends, with its run or the text of its error."""
        return self.apply(run_job, jobs)

    def apply(
        self, work: Callable[[Job], Result], jobs: Mapping[Key, Job]
    ) -> Iterator[tuple[Key, Result | str]]:
        """The same with other work than ``run_job``; function, jobs and results are pickled."""
        try:
            futures = {self._pool.submit(work, job): key for key, job in jobs.items()}
        except BrokenProcessPool:
            yield from ((key, _DIED) for key in jobs)
            return
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                yield futures[future], _DIED
            except MeridianError as error:
                yield futures[future], str(error)
            except Exception as error:
                yield futures[future], f"{type(error).__name__}: {error}"


def _ignore_interrupts() -> None:
    """Ctrl-C reaches the workers too; ``Workers.__exit__`` ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
