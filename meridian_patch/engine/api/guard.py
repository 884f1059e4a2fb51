"""Keeps requests going when the plug-in's own code fails in the API server."""

from vllm.logger import init_logger

from meridian_patch.engine.guarded_block import GuardedBlock

logger = init_logger("vllm.meridian_patch")


class ApiGuard(GuardedBlock):
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
