"""The replay loop: plays any source of requests on a replayed engine."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.types import ReplayRecord, ReplayRequest, StepWork

# When a request arrives, in virtual seconds, and the request.
Arrival = tuple[float, ReplayRequest]


class Source(Protocol):
    """Where requests come from; a finished one may be followed by others (a closed loop)."""

    def start(self) -> Iterable[Arrival]:
        """The requests that depend on no other."""

    def follow(self, record: ReplayRecord) -> Iterable[Arrival]:
        """The requests that follow a finished one, none of them before its last token."""


def play(
    engine: ReplayEngine,
    source: Source,
    on_step: Callable[[StepWork, float], None] = lambda _work, _seconds: None,
) -> list[ReplayRecord]:
    """Play a source to its end.

    Args:
        engine: plays it.
        source: where requests come from.
        on_step: called after each step with its work and the virtual seconds that it took.

    Returns:
        Records in the order in which their requests finished.
    """
    ties = itertools.count()
    pending = [(arrival_s, next(ties), request) for arrival_s, request in source.start()]
    heapq.heapify(pending)
    records = []
    while pending or not engine.is_idle:
        if engine.is_idle:
            engine.now = max(engine.now, pending[0][0])
        while pending and pending[0][0] <= engine.now:
            arrival_s, _, request = heapq.heappop(pending)
            engine.add(request, arrival_s)
        began_s = engine.now
        on_step(engine.step(), engine.now - began_s)
        for record in engine.take_finished():
            records.append(record)
            for arrival_s, request in source.follow(record):
                heapq.heappush(pending, (arrival_s, next(ties), request))
    return records
