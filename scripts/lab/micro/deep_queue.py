"""Times our operations on vLLM's real scheduler with a deep queue and a full KV pool."""

from collections.abc import Callable

from vllm.v1.request import RequestStatus

from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_template_tokens
from meridian_patch.replay.types import EngineLimits, ReplayArm, ReplayRequest
from meridian_patch.telemetry.counters import FALLBACK, Fallback
from micro.timing import time_calls

# Mean context that the pool has room for: half of what the requests would hold.
_CONTEXT_TOKENS = 1024
# Steps from one arrival to the next.
_ARRIVES_EVERY = 2
_PRIORITIES = (0, -1, 0, 1, 0, -3)


class DeepQueue:
    """A scheduler whose pool is full, so that requests are preempted, in front of a long queue.

    KV blocks are missing, seats are not. Requests of several priorities come in all the time.

    Args:
        arm: our scheduler and its settings.
        running: requests that the pool has room for, at half of the context of a chat.
        waiting: requests that wait behind them.
        draw: the next request, by its number.

    Attributes:
        seconds: CPU seconds of each call of each operation, since ``forget``.
    """

    def __init__(
        self,
        arm: ReplayArm,
        running: int,
        waiting: int,
        draw: Callable[[int], ReplayRequest],
    ) -> None:
        blocks = running * _CONTEXT_TOKENS // BLOCK_SIZE
        limits = EngineLimits(max_num_seqs=2 * running)
        self._engine = ReplayEngine(
            arm, blocks, lambda _work: 0.02, read_template_tokens(), limits=limits
        )
        self._draw = draw
        self._drawn = 0
        self._steps = 0
        self.seconds: dict[str, list[float]] = {}
        for _ in range(running + waiting):
            self._add()
        scheduler = self._engine.scheduler
        parts = scheduler.policy_parts
        for owner, name, shown in (
            (parts.cut, "before_schedule", "cut"),
            (parts.displacing, "before_schedule", "make room"),
            (parts.order, "order_running", "order"),
            (parts.first, "is_uncontended", "look whether to plan"),
            (scheduler.phase_part, "_track", "follow a new request"),
            (scheduler.phase_part, "update_phase", "take tokens in"),
            (parts.queue, "on_added", "place an arrival"),
            (parts.first, "after_schedule", "note a step"),
            (parts.timing, "before_update", "learn from a step"),
            (scheduler.request_states, "drop", "forget a request"),
            (parts.queue, "on_preempted", "note a preemption"),
        ):
            time_calls(owner, name, self.seconds.setdefault(shown, []).append)
        # Hooks are looked up once.
        scheduler._parts._find_hooks()

    @property
    def num_preempted_for_room(self) -> int:
        """Requests that were displaced and wait now."""
        waiting = self._engine.scheduler.waiting
        return sum(request.status is RequestStatus.PREEMPTED for request in waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that wait now."""
        return len(self._engine.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that run now."""
        return len(self._engine.scheduler.running)

    @property
    def num_slow(self) -> int:
        """Plans and orders that took longer than the configured time budget, since the start."""
        return self._engine.counters().get(f"{FALLBACK}:{Fallback.SLOW}", 0)

    def preempt_for_room(self, count: int) -> None:
        """Preempt the last ``count`` running requests, which think, for waiting ones."""
        scheduler = self._engine.scheduler
        for request in scheduler.running[-count:]:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, 0.0, drop_stale_output=True)
            state = scheduler.request_states.of(request)
            scheduler.policy_parts.waiting_order.put_at_level(state, 1, scheduler.waiting)

    def forget(self) -> None:
        """Drop what was measured so far."""
        for seconds in self.seconds.values():
            seconds.clear()

    def step(self) -> None:
        """One step; a request comes in for each that ended, and one more in every second step."""
        self._engine.step()
        self._steps += 1
        for _ in self._engine.take_finished():
            self._add()
        if self._steps % _ARRIVES_EVERY == 0:
            self._add(priority=_PRIORITIES[self._drawn % len(_PRIORITIES)])

    def _add(self, priority: int = 0) -> None:
        fields = {"meridian_priority": priority} if priority else None
        self._engine.add(self._draw(self._drawn), self._engine.now, fields)
        self._drawn += 1
