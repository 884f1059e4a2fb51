"""One replay of the ``s-turns`` workload, and the figures of it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meridian_patch.bench.simulated.conversations import (
    Conversation,
    History,
    TurnsLoad,
    build_output,
    build_prompt,
    draw_conversations,
    without_pauses,
)
from meridian_patch.bench.simulated.cost import load_cost
from meridian_patch.errors import BenchError
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.player import Arrival, play
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_markers
from meridian_patch.replay.types import Markers, ReplayArm, ReplayRecord, ReplayRequest

# Saturated throughput is taken between these shares of all output tokens: before, the pool fills;
# after, too few conversations are left to fill it.
_STEADY = (0.1, 0.8)


@dataclass(frozen=True)
class TurnsJob:
    """One replay; picklable, so that a worker process can run it.

    Attributes:
        pool_tokens: KV pool, in tokens.
        cost: name or path of a cost model.
        is_saturated: everything is offered at once and pauses are dropped; ``rate_per_s`` is of
            no account.
    """

    history: History
    pool_tokens: int
    rate_per_s: float
    seed: int
    arm: ReplayArm
    conversations: int
    cost: str
    think_factor: float = 1.0
    is_saturated: bool = False
    is_async: bool = True


@dataclass(frozen=True)
class TurnsRun:
    """Figures of one replay; tokens are counts, times seconds of the virtual clock.

    Attributes:
        prompt_tokens: of all requests together; the same for every arm.
        hit_tokens: found in the prefix cache at the first admission; resumes are not counted.
        bound_tokens: that an infinite cache would have held then.
        steady_tokens_per_s: output tokens per second between 10 % and 80 % of all output.
        counters: the patched scheduler's own counts; empty for stock.
        wall_s: real time of the replay.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    bound_tokens: int
    output_tokens: int
    conversations: int
    makespan_s: float
    steady_tokens_per_s: float
    ttft_mean_s: float
    ttfat_mean_s: float
    ttfat_p99_s: float
    preemptions: int
    recomputed_tokens: int
    counters: Mapping[str, int]
    wall_s: float

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def bound_share(self) -> float:
        """The hit share of an infinite cache."""
        return self.bound_tokens / self.prompt_tokens

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole replay."""
        return self.output_tokens / self.makespan_s


class TurnsSource:
    """Conversations as a closed loop: the next request comes a pause after the last answer."""

    def __init__(
        self, conversations: Sequence[Conversation], history: History, markers: Markers
    ) -> None:
        self._conversations = conversations
        self._history = history
        self._markers = markers
        # Position of a live request: conversation and exchange.
        self._places: dict[str, tuple[int, int]] = {}

    def start(self) -> Iterator[Arrival]:
        for number, conversation in enumerate(self._conversations):
            yield conversation.arrival_s, self._request(number, 0)

    def follow(self, record: ReplayRecord) -> Iterator[Arrival]:
        number, index = self._places.pop(record.request.request_id)
        exchanges = self._conversations[number].exchanges
        if index + 1 < len(exchanges):
            arrival_s = record.token_s[-1] + exchanges[index + 1].pause_s
            yield arrival_s, self._request(number, index + 1)

    def _request(self, number: int, index: int) -> ReplayRequest:
        conversation = self._conversations[number]
        request_id = f"{number}-{index}"
        self._places[request_id] = number, index
        prompt = build_prompt(conversation, index, self._history, self._markers)
        output, answer_start = build_output(
            conversation.exchanges[index], self._history, self._markers
        )
        return ReplayRequest(
            request_id,
            prompt,
            output,
            answer_start,
            shared_tokens=len(conversation.system) + 1,  # with its marker
            is_last=index + 1 == len(conversation.exchanges),
        )


def run_job(job: TurnsJob, on_finished: Callable[[], None] = lambda: None) -> TurnsRun:
    """Replay one job from start to end.

    Raises:
        BenchError: the cost model cannot be loaded, or the pool cannot hold one request.
        ConfigError: the arm sets something that does not exist.
    """
    started = time.perf_counter()
    load = TurnsLoad(job.history, job.conversations, job.rate_per_s, job.think_factor)
    markers = read_markers()
    conversations = draw_conversations(load, job.seed, markers.content_ids)
    if job.is_saturated:
        conversations = [without_pauses(conversation) for conversation in conversations]
    _check_pool(job, conversations, markers)
    engine = ReplayEngine(
        job.arm,
        job.pool_tokens // BLOCK_SIZE,
        load_cost(job.cost).step_seconds,
        markers,
        is_async=job.is_async,
    )
    records = play(engine, TurnsSource(conversations, job.history, markers), on_finished)
    token_s = np.sort([stamp for record in records for stamp in record.token_s])
    ttfat = [r.token_s[r.request.answer_start] - r.arrival_s for r in records]
    return TurnsRun(
        requests=len(records),
        prompt_tokens=sum(len(r.request.prompt) for r in records),
        hit_tokens=sum(r.hit_tokens for r in records),
        bound_tokens=sum(r.bound_tokens for r in records),
        output_tokens=len(token_s),
        conversations=len(conversations),
        makespan_s=float(token_s[-1]),
        steady_tokens_per_s=_steady_rate(token_s),
        ttft_mean_s=float(np.mean([r.token_s[0] - r.arrival_s for r in records])),
        ttfat_mean_s=float(np.mean(ttfat)),
        ttfat_p99_s=float(np.quantile(ttfat, 0.99)),
        preemptions=engine.totals.preemptions,
        recomputed_tokens=engine.totals.recomputed_tokens,
        counters=engine.counters(),
        wall_s=time.perf_counter() - started,
    )


def _check_pool(job: TurnsJob, conversations: Sequence[Conversation], markers: Markers) -> None:
    """A request that needs more than the pool would be preempted and resumed for ever."""
    largest = max(
        len(build_prompt(conversation, index, job.history, markers))
        + len(build_output(exchange, job.history, markers)[0])
        for conversation in conversations
        for index, exchange in enumerate(conversation.exchanges)
    )
    # Under async scheduling one token more is scheduled before the stop is seen.
    needed = (-(-(largest + 1) // BLOCK_SIZE)) * BLOCK_SIZE
    if job.pool_tokens < needed:
        raise BenchError(
            f"--pool is {job.pool_tokens} tokens, expected at least {needed}: the longest request "
            f"of seed {job.seed} ({job.history}) must fit into the KV pool"
        )


def _steady_rate(token_s: NDArray[np.float64]) -> float:
    first, last = (int(share * (len(token_s) - 1)) for share in _STEADY)
    span_s = token_s[last] - token_s[first]
    return float((last - first) / span_s) if span_s > 0 else 0.0
