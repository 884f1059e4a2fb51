"""Keeps the engine alive when our own code fails: the step then runs as stock."""

from types import TracebackType

from vllm.logger import init_logger

from meridian_patch.telemetry.counters import FALLBACK, Fallback, PhaseCounters

logger = init_logger("vllm.meridian_patch")


class StepGuard:
    """Catches what our code raises, counts each step it happens in, and logs it once per step."""

    def __init__(self, counters: PhaseCounters) -> None:
        self._counters = counters
        self._is_reported = False

    def new_step(self) -> None:
        self._is_reported = False

    def protect(self, what: str, request_id: str | None = None) -> "_Protection":
        """Run a block of ours; an exception ends the block and nothing else."""
        return _Protection(self, what, request_id)

    def failed(self, what: str, error: Exception, request_id: str | None = None) -> None:
        """Count and log an exception."""
        if self._is_reported:
            return
        self._is_reported = True
        self._counters.count(FALLBACK, Fallback.EXCEPTION)
        logger.error(
            "meridian_patch: %s failed for request %s; this step runs as stock",
            what,
            getattr(error, "request_id", request_id),
            exc_info=error,
        )


class _Protection:
    """A context manager of its own: one made of a generator costs thrice as much."""

    __slots__ = ("_guard", "_request_id", "_what")

    def __init__(self, guard: StepGuard, what: str, request_id: str | None) -> None:
        self._guard = guard
        self._what = what
        self._request_id = request_id

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._guard.failed(self._what, error, self._request_id)
        return True
