"""Keeps requests going when the plug-in's own code fails in the API server."""

from types import TracebackType

from vllm.logger import init_logger

logger = init_logger("vllm.meridian_patch")


class ApiGuard:
    """Context manager for the plug-in's code: an exception ends the block and nothing else.

    vLLM ends every request if one step's outputs cannot be processed. The first exception is
    logged with its traceback.

    Args:
        what: what is not done then, for the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._has_failed = False

    def failed(self, error: Exception) -> None:
        """Log an exception that was caught elsewhere, if it is the first."""
        if not self._has_failed:
            self._has_failed = True
            logger.error("meridian_patch: %s", self._what, exc_info=error)

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
        self.failed(error)
        return True
