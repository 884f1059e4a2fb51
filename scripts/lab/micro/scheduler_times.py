"""Times each call of vLLM's scheduler, stock and ours side by side on the same load."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_template_tokens
from meridian_patch.replay.types import ReplayArm, ReplayRequest
from micro.timing import Seconds, time_calls

SCHEDULE, UPDATE = "schedule", "update_from_output"
# By call, the time in it that is not in vLLM's method of the same name.
OWN = {SCHEDULE: "own part of schedule", UPDATE: "own part of update"}
# Mean context that the pool has room for; no request is preempted, so all arms do the same.
CONTEXT_TOKENS = 3072
# Share of the running requests that must decode before timing begins.
_DECODING_SHARE = 0.97
SETTLING_STEPS = 30


class PolicyMicro:
    """One scheduler per arm, in lock step, each with ``running`` requests running.

    A finished request is replaced at once, so ``running`` run and ``waiting`` wait at all times.
    vLLM's own methods are timed, too, also where our scheduler calls them, until ``close``.

    Args:
        arms: the schedulers to compare.
        running: requests that run, which is also the most that may.
        waiting: requests that wait behind them.
        draw: the next request of an arm, by its number; the same for every arm.

    Attributes:
        lanes: one per arm; they take turns in being first.
    """

    def __init__(
        self,
        arms: Sequence[ReplayArm],
        running: int,
        waiting: int,
        draw: Callable[[int], ReplayRequest],
    ) -> None:
        upstream: Seconds = {}
        self._originals: list[tuple[type, str, Any]] = []
        # Before the lanes: a stock scheduler's method is looked up when its lane is built.
        for call in OWN:
            owner = next(cls for cls in AsyncScheduler.__mro__ if call in vars(cls))
            self._originals.append((owner, call, getattr(owner, call)))
            time_calls(owner, call, partial(_add, upstream, call))
        self.lanes = [_Lane(arm, running, draw, upstream) for arm in arms]
        for lane in self.lanes:
            lane.add(running + waiting)

    def close(self) -> None:
        """Stop timing vLLM's own methods."""
        for owner, call, original in self._originals:
            setattr(owner, call, original)

    @property
    def preemptions(self) -> int:
        """Preemptions so far, all arms together; the arms are comparable while there are none."""
        return sum(lane.engine.totals.preemptions for lane in self.lanes)

    def settle(self) -> None:
        """Run until prompts are prefilled and the mix of requests is steady."""
        while any(lane.is_prefilling for lane in self.lanes):
            list(self.step())
        for _ in range(SETTLING_STEPS):
            list(self.step())

    def step(self) -> Iterator[tuple[str, Seconds]]:
        """One step of every arm; per arm, the CPU seconds of each call, and of its own part."""
        # Each arm is first in turn: the first one finds cold caches.
        self.lanes.append(self.lanes.pop(0))
        for lane in self.lanes:
            yield lane.name, lane.step()


class _Lane:
    """One arm's scheduler and the load on it."""

    def __init__(
        self,
        arm: ReplayArm,
        running: int,
        draw: Callable[[int], ReplayRequest],
        upstream: Seconds,
    ) -> None:
        blocks = running * CONTEXT_TOKENS // BLOCK_SIZE
        self.name = arm.name
        self.engine = ReplayEngine(arm, blocks, lambda _work: 0.02, read_template_tokens())
        # Load-bearing: schedule() admits by the first, and asserts the second.
        self.engine.scheduler.max_num_active_reqs = running
        self.engine.scheduler.max_num_running_reqs = running
        self._running = running
        self._draw = draw
        self._drawn = 0
        self._upstream = upstream
        self._whole: Seconds = {}
        for call in OWN:
            time_calls(self.engine.scheduler, call, partial(_add, self._whole, call))

    @property
    def is_prefilling(self) -> bool:
        """Whether the first requests still prefill; among many, a later one always does."""
        decoding = sum(
            not request.is_prefill_chunk and request.num_output_tokens > 0
            for request in self.engine.scheduler.running
        )
        return decoding < _DECODING_SHARE * self._running

    def add(self, count: int) -> None:
        for number in range(self._drawn, self._drawn + count):
            self.engine.add(self._draw(number), self.engine.now)
        self._drawn += count

    def step(self) -> Seconds:
        self._whole.clear()
        self._upstream.clear()
        self.engine.step()
        self.add(len(self.engine.take_finished()))
        own = {OWN[call]: whole - self._upstream[call] for call, whole in self._whole.items()}
        return self._whole | own


def _add(totals: Seconds, call: str, seconds: float) -> None:
    totals[call] = totals.get(call, 0.0) + seconds
