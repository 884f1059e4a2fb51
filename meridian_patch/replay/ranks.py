"""Drives several schedulers in lock step, as data-parallel ranks of a mixture of experts step.

All ranks compute each step together on one virtual clock, so a step takes as long as its slowest
rank needs. A rank without requests computes a dummy batch. The front that chooses a rank for each
request is vLLM's own, with the counts that vLLM's coordinator would publish.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from meridian_patch.engine.scheduler import rank_exchange
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.player import Source
from meridian_patch.replay.types import EngineLimits, ReplayArm, ReplayRecord, StepWork

# How often vLLM's coordinator publishes counts, in virtual seconds.
PUBLISH_S = 0.1


class Board:
    """Answers on all ranks of one process; what is told in a step is heard in the next one."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}
        self.seen: dict[int, int] = {}

    def next_step(self) -> None:
        self.seen, self.told = self.told, {}


class BoardExchange:
    """One rank's place at the board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank

    def tell(self, answering: int) -> None:
        self._board.told[self._rank] = answering

    def hear(self) -> int:
        return sum(count for rank, count in self._board.seen.items() if rank != self._rank)


@contextmanager
def at_board(board: Board, rank: int) -> Iterator[None]:
    """Schedulers that are built within this context meet others at the board."""
    exchange = BoardExchange(board, rank)
    with patch.object(rank_exchange, "join_ranks", lambda _: exchange):
        yield


class LockStepRanks:
    """Ranks that step together.

    Attributes:
        engines: one per rank.
        front: vLLM's client with data-parallel balancing, without its sockets.
        steps: lock steps so far.
        idle_rank_steps: ranks that computed nothing, summed over the steps.
        worst_queue: the most requests that ever waited on one rank.
    """

    def __init__(
        self,
        number: int,
        arm: ReplayArm,
        blocks: int,
        step_seconds: Callable[[StepWork], float],
        template: Any,
        limits: EngineLimits | None = None,
    ) -> None:
        self._board = Board()
        self.engines: list[ReplayEngine] = []
        for rank in range(number):
            with at_board(self._board, rank):
                engine = ReplayEngine(arm, blocks, step_seconds, template, limits=limits)
            self.engines.append(engine)
        self.front = _make_front(number)
        self.steps = self.idle_rank_steps = self.worst_queue = 0
        self.prefill_steps = 0
        self._published_s = float("-inf")

    @property
    def now(self) -> float:
        return self.engines[0].now

    @property
    def is_idle(self) -> bool:
        return all(engine.is_idle for engine in self.engines)

    def move_to(self, now_s: float) -> None:
        """Set the clock of all ranks."""
        for engine in self.engines:
            engine.now = now_s

    def add(self, request: Any, arrival_s: float) -> None:
        """Submit a request to the rank that the front chooses."""
        asked = SimpleNamespace(
            request_id=request.request_id,
            data_parallel_rank=None,
            pooling_params=None,
            resumable=False,
        )
        identity = self.front.get_core_engine_for_request(asked)
        self.engines[int.from_bytes(identity, "little")].add(request, arrival_s)

    def step(self) -> list[ReplayRecord]:
        """One step of all ranks; returns the requests that finished."""
        began_s, ends = self.now, []
        self._board.next_step()
        has_prefill = False
        for engine in self.engines:
            if engine.is_idle:
                self.idle_rank_steps += 1
                continue
            work = engine.step()
            has_prefill |= bool(work.prefill_tokens)
            if not work.prefill_tokens + work.decode_seqs:
                self.idle_rank_steps += 1
            ends.append(engine.now)
        self.steps += 1
        self.prefill_steps += has_prefill
        self.move_to(max(ends, default=began_s))
        self.worst_queue = max(self.worst_queue, *(each.num_waiting for each in self.engines))
        finished = [record for engine in self.engines for record in engine.take_finished()]
        self._tell_front(finished)
        return finished

    def _tell_front(self, finished: Sequence[ReplayRecord]) -> None:
        names = {record.request.request_id for record in finished}
        if names:
            outputs = EngineCoreOutputs(finished_requests=names)
            asyncio.run(DPLBAsyncMPClient.process_engine_outputs(self.front, outputs))
        if self.now - self._published_s >= PUBLISH_S:
            self._published_s = self.now
            self.front.lb_engines = [
                [*reversed(engine.scheduler.get_request_counts()), engine.kv_usage]
                for engine in self.engines
            ]


def _make_front(number: int) -> Any:
    """A client of vLLM for so many ranks, which only chooses ranks."""
    front: Any = object.__new__(DPLBAsyncMPClient)
    front.core_engines = [rank.to_bytes(2, "little") for rank in range(number)]
    front.lb_engines = [[0, 0, 0.0] for _ in range(number)]
    front.engine_inflight = Counter()
    front.reqs_in_flight = {}
    # vLLM 0.32 has none.
    front.streaming_reqs = set()
    front.client_count = 1
    front.client_index = 0
    front.eng_start_index = 0
    return front


def play_ranks(ranks: LockStepRanks, source: Source) -> list[ReplayRecord]:
    """Play a source of single requests to its end."""
    pending = sorted(source.start(), key=lambda arrival: arrival[0])
    pending.reverse()
    records: list[ReplayRecord] = []
    while pending or not ranks.is_idle:
        if ranks.is_idle:
            ranks.move_to(max(ranks.now, pending[-1][0]))
        while pending and pending[-1][0] <= ranks.now:
            arrival_s, request = pending.pop()
            ranks.add(request, arrival_s)
        for record in ranks.step():
            records.append(record)
            if any(True for _ in source.follow(record)):
                raise ValueError("requests that follow others are not played on ranks")
    return records
