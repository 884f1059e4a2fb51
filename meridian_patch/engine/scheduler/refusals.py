"""Which waiting request upstream wanted KV blocks for, and found too few."""

from typing import Any

from vllm.v1.request import RequestStatus

# Load-bearing: a request that waits has one of these when its blocks are asked for.
_WAITING = {RequestStatus.WAITING, RequestStatus.PREEMPTED}


class Refusals:
    """Looks at what a KV cache manager answers.

    That nothing but blocks keeps a request out is known for certain once upstream has asked for
    them: it does so when it has looked at all else.

    Args:
        manager: upstream's KV cache manager, or ours.
    """

    def __init__(self, manager: Any) -> None:
        self._allocate = manager.allocate_slots
        # The request that waits for what it was refused last.
        self._last: Any | None = None
        self._reserved_blocks = 0
        # Load-bearing: the scheduler reads the attribute anew in each call.
        manager.allocate_slots = self._ask

    def is_last(self, request: Any) -> bool:
        """Whether it was refused, no other since, and it was not admitted since."""
        return self._last is request

    def reserved_blocks(self, request: Any) -> int:
        """Free blocks that its admission must leave to others, when it was refused last."""
        return self._reserved_blocks if self._last is request else 0

    def left(self, request: Any) -> None:
        """The request is gone."""
        if self._last is request:
            self._last = None

    def _ask(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = self._allocate(request, *args, **kwargs)
        if blocks is None and request.status in _WAITING:
            self._last = request
            # Load-bearing: an asynchronous load leaves those that prompts under way will take.
            self._reserved_blocks = kwargs.get("reserved_blocks", 0)
        elif self._last is request:
            self._last = None
        return blocks
