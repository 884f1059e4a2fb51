"""Times each call of vLLM's scheduler, stock and ours side by side on the same load."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_markers
from meridian_patch.replay.types import ReplayArm, ReplayRequest

SCHEDULE, UPDATE = "schedule", "update_from_output"
# What a call takes beside the call of vLLM's own that it makes, by call.
OWN = {SCHEDULE: "own part of schedule", UPDATE: "own part of update"}
# Mean context that the pool has room for; no request is preempted, so all arms do the same.
CONTEXT_TOKENS = 3072
# Of the requests that run, how many decode at least once the load has settled.
_DECODING_SHARE = 0.97
SETTLING_STEPS = 30


class PolicyMicro:
    """One scheduler per arm, in lock step, each with ``running`` requests running.

    A finished request is replaced at once, so ``running`` run and ``waiting`` wait at all times.

    Args:
        arms: the schedulers to compare.
        running: requests that run, which is also the most that may.
        waiting: requests that wait behind them.
        draw: the next request of an arm, by its number; the same for every arm.
    """

    def __init__(
        self,
        arms: Sequence[ReplayArm],
        running: int,
        waiting: int,
        draw: Callable[[int], ReplayRequest],
    ) -> None:
        self._running = running
        self._upstream = _Upstream()
        self._lanes = [_Lane(arm, running, draw, self._upstream) for arm in arms]
        for lane in self._lanes:
            lane.add(running + waiting)

    @property
    def preemptions(self) -> int:
        """Preemptions so far, all arms together; the arms are comparable while there are none."""
        return sum(lane.engine.totals.preemptions for lane in self._lanes)

    def settle(self) -> None:
        """Prefill what runs, and go on until the mix is that of a server at work."""
        while any(lane.is_prefilling for lane in self._lanes):
            list(self.step())
        for _ in range(SETTLING_STEPS):
            list(self.step())

    def step(self) -> Iterator[tuple[str, dict[str, float]]]:
        """One step of every arm; per arm, the CPU seconds of each call, and of its own part.

        The scheduler never waits, so this is the time that it takes on a machine of its own.
        """
        # Each arm comes first in turn, when the caches are cold.
        self._lanes.append(self._lanes.pop(0))
        for lane in self._lanes:
            with self._upstream.timed(lane.engine.scheduler):
                seconds = lane.step()
            yield lane.name, seconds


class _Upstream:
    """Times vLLM's own calls, those that our scheduler makes included.

    Attributes:
        seconds: CPU seconds of each call so far.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((SCHEDULE, UPDATE), 0.0)

    @contextmanager
    def timed(self, scheduler: Any) -> Iterator[None]:
        """Within this block ``seconds`` grows by the calls of the scheduler's class."""
        owners = {call: _owner_of(call, type(scheduler)) for call in self.seconds}
        originals = {call: getattr(owner, call) for call, owner in owners.items()}
        try:
            for call, owner in owners.items():
                setattr(owner, call, self._timed(originals[call], call))
            yield
        finally:
            for call, owner in owners.items():
                setattr(owner, call, originals[call])

    def _timed(self, original: Callable[..., Any], call: str) -> Callable[..., Any]:
        seconds = self.seconds

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = original(*args, **kwargs)
            seconds[call] += time.thread_time() - start
            return result

        return timed


def _owner_of(call: str, scheduler: type) -> type:
    """The class of vLLM's whose method a scheduler's own one calls."""
    return next(
        cls for cls in scheduler.__mro__ if call in vars(cls) and cls.__module__.startswith("vllm.")
    )


class _Lane:
    """One arm's scheduler and the load on it."""

    def __init__(
        self,
        arm: ReplayArm,
        running: int,
        draw: Callable[[int], ReplayRequest],
        upstream: _Upstream,
    ) -> None:
        blocks = running * CONTEXT_TOKENS // BLOCK_SIZE
        self.name = arm.name
        self.engine = ReplayEngine(arm, blocks, lambda _work: 0.02, read_markers())
        # Load-bearing: schedule() admits by the first, and asserts the second.
        self.engine.scheduler.max_num_active_reqs = running
        self.engine.scheduler.max_num_running_reqs = running
        self._running = running
        self._draw = draw
        self._drawn = 0
        self._upstream = upstream
        self._seconds: dict[str, float] = {}
        for call in (SCHEDULE, UPDATE):
            self._time(call)

    @property
    def is_prefilling(self) -> bool:
        """Whether the first requests are; with many, a later request always is."""
        decoding = sum(
            not request.is_prefill_chunk and request.num_output_tokens > 0
            for request in self.engine.scheduler.running
        )
        return decoding < _DECODING_SHARE * self._running

    def add(self, count: int) -> None:
        for number in range(self._drawn, self._drawn + count):
            self.engine.add(self._draw(number), self.engine.now)
        self._drawn += count

    def step(self) -> dict[str, float]:
        self._seconds.clear()
        self.engine.step()
        self.add(len(self.engine.take_finished()))
        return dict(self._seconds)

    def _time(self, call: str) -> None:
        scheduler, seconds = self.engine.scheduler, self._seconds
        upstream = self._upstream.seconds

        def timed(*args: Any) -> Any:
            start, before = time.thread_time(), upstream[call]
            # Looked up here: the class's method is another one while vLLM's calls are timed.
            result = getattr(type(scheduler), call)(scheduler, *args)
            whole = time.thread_time() - start
            seconds[call] = seconds.get(call, 0.0) + whole
            own = whole - (upstream[call] - before)
            seconds[OWN[call]] = seconds.get(OWN[call], 0.0) + own
            return result

        setattr(scheduler, call, timed)
