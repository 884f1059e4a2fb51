"""Keeps the engine alive when our own code fails: the step then runs as stock."""

from collections.abc import Iterator
from contextlib import contextmanager

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

    @contextmanager
    def protect(self, what: str, request_id: str | None = None) -> Iterator[None]:
        """Run a block of ours; an exception ends the block and nothing else."""
        try:
            yield
        except Exception as error:
            self.failed(what, error, request_id)

    def failed(self, what: str, error: Exception, request_id: str | None = None) -> None:
        """What ``protect`` does with an exception, for code that is too hot for it."""
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
