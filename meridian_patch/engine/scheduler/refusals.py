"""Records the waiting request for which upstream last failed to allocate KV blocks."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from meridian_patch.engine.early_exit.probe_request import ProbeRequest


class Refusals:
    """Wraps a KV cache manager's ``allocate_slots`` and records what it refuses.

    Upstream asks for blocks after all other checks. So a refusal proves that blocks are all that
    the request lacks, and upstream itself counts how many it needs.

    Attributes:
        last: the request that was refused last, and not admitted since; it may have left.
    """

    def __init__(self) -> None:
        self.last: Any | None = None
        # Blocks of its prefix that are in the cache, by cache group.
        self._prefix: Sequence[Sequence[Any]] = ()
        self._needed = self._counted = 0
        self._manager: Any = None

    def listen(self, manager: Any) -> None:
        """Record what upstream's KV cache manager, or the phase-aware one, refuses from now on."""
        if manager is self._manager:
            return
        self._manager = manager
        self._allocate = manager.allocate_slots
        self._count = manager.coordinator.get_num_blocks_to_allocate
        # Load-bearing: the scheduler looks this attribute up in each call.
        manager.allocate_slots = self._ask

    def num_missing(self, request: Any) -> int:
        """Blocks that the request refused last lacks now; 0 for others."""
        if self.last is not request:
            return 0
        return int(self._needed - self._manager.block_pool.get_num_free_blocks())

    def prefix_of(self, request: Any) -> Sequence[Sequence[Any]]:
        """Cached blocks of the prefix of the request refused last, by cache group."""
        return self._prefix if self.last is request else ()

    def forget(self, request: Any) -> None:
        """Forget a request that left the scheduler."""
        if self.last is request:
            self.last, self._prefix = None, ()

    def _ask(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Load-bearing: a waiting request has another status while upstream allocates its blocks.
        if request.status is RequestStatus.RUNNING or isinstance(request, ProbeRequest):
            return self._allocate(request, *args, **kwargs)
        coordinator = self._manager.coordinator
        # Load-bearing: ``allocate_slots`` looks this attribute up in each call, and refuses right
        # after the last one.
        coordinator.get_num_blocks_to_allocate = self._note_count
        try:
            blocks = self._allocate(request, *args, **kwargs)
        finally:
            coordinator.get_num_blocks_to_allocate = self._count
        if blocks is None:
            self._refused(request, **kwargs)
        else:
            self.forget(request)
        return blocks

    def _note_count(self, *args: Any, **kwargs: Any) -> int:
        self._counted = int(self._count(*args, **kwargs))
        return self._counted

    def _refused(
        self,
        request: Any,
        new_computed_blocks: Any = None,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        **_: Any,
    ) -> None:
        # Load-bearing: upstream passes these by name. Beside what it counts it leaves a watermark,
        # and blocks for prompts in progress where a request loads its KV asynchronously.
        watermark = self._manager.watermark_blocks if has_scheduled_reqs else 0
        self.last = request
        self._prefix = new_computed_blocks.blocks if new_computed_blocks else ()
        self._needed = self._counted + watermark + reserved_blocks
