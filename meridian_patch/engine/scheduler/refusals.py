"""Records the waiting request for which upstream last failed to allocate KV blocks."""

from typing import Any

from vllm.v1.request import RequestStatus

# Load-bearing: a waiting request has one of these states when upstream allocates its blocks.
_WAITING = {RequestStatus.WAITING, RequestStatus.PREEMPTED}


class Refusals:
    """Wraps a KV cache manager's ``allocate_slots`` and records refusals.

    Upstream asks for blocks after all other checks. So a refusal proves that blocks are all that
    the request lacks.

    Args:
        manager: upstream's KV cache manager, or the phase-aware one.
    """

    def __init__(self, manager: Any) -> None:
        self._allocate = manager.allocate_slots
        # The request that was refused last and still waits.
        self._last: Any | None = None
        self._reserved_blocks = 0
        # Load-bearing: the scheduler looks this attribute up in each call.
        manager.allocate_slots = self._ask

    def is_last(self, request: Any) -> bool:
        """Whether this request was refused last, and not admitted since."""
        return self._last is request

    def reserved_blocks(self, request: Any) -> int:
        """Free blocks that the admission of the request refused last must leave; 0 for others."""
        return self._reserved_blocks if self._last is request else 0

    def on_removed(self, request: Any) -> None:
        """Forget a request that left the scheduler."""
        if self._last is request:
            self._last = None

    def _ask(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = self._allocate(request, *args, **kwargs)
        if blocks is None and request.status in _WAITING:
            self._last = request
            # Load-bearing: upstream reserves blocks for prompts in progress when a request loads
            # its KV asynchronously.
            self._reserved_blocks = kwargs.get("reserved_blocks", 0)
        elif self._last is request:
            self._last = None
        return blocks
