"""Times each call of vLLM's scheduler, stock and ours side by side on the same load."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meridian_patch.engine.replay import ReplayEngine
from meridian_patch.engine.replay_scheduler import BLOCK_SIZE, read_markers
from meridian_patch.engine.replay_types import ReplayArm, ReplayRequest

SCHEDULE, UPDATE = "schedule", "update_from_output"
# Mean context that the pool has room for; nobody is preempted then, and all arms do the same.
CONTEXT_TOKENS = 3072
# Of the requests that run, how many decode at least once the load has settled.
_DECODING_SHARE = 0.97
SETTLING_STEPS = 30


class PolicyMicro:
    """One scheduler per arm, in lock step, each with ``running`` requests running.

    Whoever finishes is replaced at once, so ``running`` run and ``waiting`` wait at all times.

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
        self._lanes = [_Lane(arm, running, draw) for arm in arms]
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
        """One step of every arm; per arm, the CPU seconds of each call.

        The scheduler never waits, so this is the time that it takes on a machine of its own.
        """
        # Nobody always comes first, when the caches are cold.
        self._lanes.append(self._lanes.pop(0))
        for lane in self._lanes:
            yield lane.name, lane.step()


class _Lane:
    """One arm's scheduler and the load on it."""

    def __init__(self, arm: ReplayArm, running: int, draw: Callable[[int], ReplayRequest]) -> None:
        blocks = running * CONTEXT_TOKENS // BLOCK_SIZE
        self.name = arm.name
        self.engine = ReplayEngine(arm, blocks, lambda _work: 0.02, read_markers())
        # Load-bearing: schedule() admits by the first, and asserts the second.
        self.engine.scheduler.max_num_active_reqs = running
        self.engine.scheduler.max_num_running_reqs = running
        self._running = running
        self._draw = draw
        self._drawn = 0
        self._seconds: dict[str, float] = {}
        for call in (SCHEDULE, UPDATE):
            self._time(call)

    @property
    def is_prefilling(self) -> bool:
        """Whether the first requests are; with many, somebody always is who came later."""
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
        original = getattr(scheduler, call)

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            result = original(*args)
            seconds[call] = seconds.get(call, 0.0) + time.thread_time() - start
            return result

        setattr(scheduler, call, timed)
