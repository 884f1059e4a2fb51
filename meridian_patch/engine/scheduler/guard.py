"""Keeps the engine running when the plug-in's own code fails: the step then runs as stock."""

from collections import deque
from collections.abc import Iterable

from vllm.logger import init_logger

from meridian_patch.engine.guarded_block import GuardedBlock
from meridian_patch.telemetry.counters import FALLBACK, PART_OFF, Fallback, PhaseCounters

logger = init_logger("vllm.meridian_patch")

# A part that fails in this many of the watched steps is switched off until the next start.
MOST_FAILED_STEPS = 10
WATCHED_STEPS = 100


class StepGuard:
    """Catches exceptions of the plug-in's code, and counts the steps in which they occur.

    It is also a circuit breaker. A part that fails in ``MOST_FAILED_STEPS`` of the last
    ``WATCHED_STEPS`` steps is switched off, and listed as ``parts_off`` in the status report.
    The first failure of a part within ``WATCHED_STEPS`` steps is logged with its traceback.
    Further ones are only counted.
    """

    def __init__(self, counters: PhaseCounters) -> None:
        self._counters = counters
        self._step = 0
        self._is_counted = False
        # The numbers of the last steps in which each part failed, by part.
        self._failed_steps: dict[str, deque[int]] = {}
        self._logged: dict[str, int] = {}
        self._tripped: list[str] = []

    def watch(self, names: Iterable[str]) -> None:
        """Register the parts that the circuit breaker may switch off."""
        for name in names:
            self._failed_steps[name] = deque(maxlen=MOST_FAILED_STEPS)

    def new_step(self) -> list[str]:
        """Begin a step; returns the names of the parts to switch off before it."""
        self._step += 1
        self._is_counted = False
        tripped, self._tripped = self._tripped, []
        return tripped

    def protect(self, what: str, request_id: str | None = None) -> "_Protection":
        """Context manager for the plug-in's code: an exception ends the block and nothing else."""
        return _Protection(self, what, request_id)

    def failed(self, what: str, error: Exception, request_id: str | None = None) -> None:
        """Count an exception, and log it unless the part logged one in ``WATCHED_STEPS`` steps."""
        if not self._is_counted:
            self._is_counted = True
            self._counters.count(FALLBACK, Fallback.EXCEPTION)
        last = self._logged.get(what)
        if last is None or self._step - last >= WATCHED_STEPS:
            self._logged[what] = self._step
            logger.error(
                "meridian_patch: %s failed for request %s; this step runs as stock",
                what,
                getattr(error, "request_id", request_id),
                exc_info=error,
            )
        self._break_circuit(what)

    def _break_circuit(self, what: str) -> None:
        steps = self._failed_steps.get(what)
        if steps is None or (steps and steps[-1] == self._step):
            return
        steps.append(self._step)
        if len(steps) == MOST_FAILED_STEPS and self._step - steps[0] < WATCHED_STEPS:
            del self._failed_steps[what]
            self._tripped.append(what)
            self._counters.count(PART_OFF, what)
            logger.error(
                "meridian_patch: %s failed in %d of the last %d steps and is off until the next "
                "start; requests go on as in stock",
                what,
                MOST_FAILED_STEPS,
                self._step - steps[0] + 1,
            )


class _Protection(GuardedBlock):
    __slots__ = ("_guard", "_request_id", "_what")

    def __init__(self, guard: StepGuard, what: str, request_id: str | None) -> None:
        self._guard = guard
        self._what = what
        self._request_id = request_id

    def failed(self, error: Exception) -> None:
        self._guard.failed(self._what, error, self._request_id)
