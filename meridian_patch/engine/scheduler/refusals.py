"""Records the waiting request for which upstream last failed to allocate KV blocks."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine.probe_request import ProbeRequest


class Refusals:
    """Wraps a KV cache manager's ``allocate_slots`` and records what it refuses.

    Upstream asks for blocks after all other checks. So a refusal proves that blocks are all that
    the request lacks, and upstream itself counts how many it needs.

    Attributes:
        last: the request that was refused last, and not admitted since; it may wait no longer.
    """

    def __init__(self) -> None:
        self.last: Any | None = None
        # Upstream's last count of blocks, that of the last refusal, and its other arguments.
        self._counted = self._needed = 0
        self._asked: dict[str, Any] = {}
        self._manager: Any = None
        self._is_listening = False

    def listen(self, manager: Any) -> None:
        """Record what a KV cache manager refuses, upstream's or ours, until ``stop``."""
        if self._is_listening:
            return
        self._manager = manager
        self._own_attribute = vars(manager).get("allocate_slots")
        self._allocate = manager.allocate_slots
        self._count = manager.coordinator.get_num_blocks_to_allocate
        # Load-bearing: the scheduler looks this attribute up in each call.
        manager.allocate_slots, self._is_listening = self._ask, True

    def stop(self) -> None:
        """Leave the manager as it was."""
        if not self._is_listening:
            return
        self._is_listening = False
        if self._own_attribute is None:
            del self._manager.allocate_slots
        else:
            self._manager.allocate_slots = self._own_attribute

    def num_missing(self, request: Request) -> int:
        """Blocks that the request refused last lacks now; 0 for others."""
        if self.last is not request:
            return 0
        # Load-bearing: upstream passes these by name. Beside what it counts it leaves a watermark,
        # and blocks for prompts in progress where a request loads its KV asynchronously.
        has_company = self._asked.get("has_scheduled_reqs", True)
        spare = self._manager.watermark_blocks if has_company else 0
        spare += self._asked.get("reserved_blocks", 0)
        return int(self._needed + spare - self._manager.block_pool.get_num_free_blocks())

    def prefix_of(self, request: Request) -> Sequence[Sequence[Any]]:
        """Cached blocks of the prefix of the request refused last, by cache group."""
        found = self._asked.get("new_computed_blocks") if self.last is request else None
        return found.blocks if found else ()

    def forget(self, request: Request) -> None:
        """Forget a request that left the scheduler."""
        if self.last is request:
            self.last, self._asked = None, {}

    def _ask(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        # Load-bearing: a waiting request has another status while upstream allocates its blocks.
        if request.status is RequestStatus.RUNNING or isinstance(request, ProbeRequest):
            return self._allocate(request, *args, **kwargs)
        coordinator = self._manager.coordinator
        # Load-bearing: ``allocate_slots`` looks this attribute up in each call, and decides by the
        # number of the last one.
        coordinator.get_num_blocks_to_allocate = self._note_count
        try:
            blocks = self._allocate(request, *args, **kwargs)
        finally:
            coordinator.get_num_blocks_to_allocate = self._count
        if blocks is None:
            self.last, self._needed, self._asked = request, self._counted, kwargs
        else:
            self.forget(request)
        return blocks

    def _note_count(self, *args: Any, **kwargs: Any) -> Any:
        self._counted = self._count(*args, **kwargs)
        return self._counted
