"""Records for which waiting request upstream, or the policy, last found no room."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.engine.scheduler.admission_checks import lacks_seat

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class Refusals:
    """Wraps a KV cache manager's ``allocate_slots`` and records what it refuses.

    Upstream asks for blocks after all other checks. So a refusal proves that blocks are all that
    the request lacks, and upstream itself counts how many it needs.

    Args:
        is_on: whether the policy asks.

    Attributes:
        is_on: whether to record what upstream refuses.
        last: the request that was refused last, and not admitted since; it may wait no longer.
    """

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.last: Request | None = None
        # The request for which no other can make room, and before which step that is the answer.
        self._hopeless: Request | None = None
        self._until_step = 0
        # Upstream's count of blocks at the last refusal, and its other arguments.
        self._needed = 0
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

    def switch_off(self) -> None:
        """Record nothing from now on."""
        self.stop()
        self.is_on = False
        self.last = self._hopeless = None
        self._asked = {}

    def give_up(self, request: Request, until_step: int) -> None:
        """Note that no room can be made for a request before a step."""
        self._hopeless, self._until_step = request, until_step

    def look_again(self) -> None:
        """Drop that note, because room may have come free."""
        self._hopeless = None

    def found_no_room(self, scheduler: "Scheduler") -> bool:
        """Whether the request that comes first had no room a few steps ago, and has none now."""
        request = self._hopeless
        if request is None or scheduler.current_step >= self._until_step:
            return False
        if not scheduler.waiting or scheduler.waiting.peek_request() is not request:
            return False
        return lacks_seat(scheduler) or self.num_missing(request) > 0

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
        coordinator, counted, by = self._manager.coordinator, 0, {}

        def note_count(*args: Any, **kwargs: Any) -> Any:
            nonlocal counted, by
            counted, by = self._count(*args, **kwargs), kwargs
            return counted

        # Load-bearing: ``allocate_slots`` looks this attribute up in each call, and decides by the
        # number of the last one.
        coordinator.get_num_blocks_to_allocate = note_count
        try:
            blocks = self._allocate(request, *args, **kwargs)
        finally:
            coordinator.get_num_blocks_to_allocate = self._count
        if blocks is None:
            needed = max(counted, self._count_next(by, *args, **kwargs))
            self.last, self._needed, self._asked = request, needed, kwargs
        else:
            self.forget(request)
        return blocks

    def _count_next(self, by: dict[str, Any], new_tokens: int, *_: Any, **asked: Any) -> int:
        """Blocks that upstream would have asked for next, with room for drafts; 0: none.

        Load-bearing: where a request is not to come in unless all of it fits, upstream counts the
        request alone first, and its next chunk with lookahead tokens only if that fits.

        Args:
            by: the arguments of its last count.
            new_tokens: tokens of the chunk.
            asked: what else upstream asked for, by name.
        """
        ahead = asked.get("num_lookahead_tokens", 0)
        if not ahead or not by.get("apply_admission_cap"):
            return 0
        computed = by["total_computed_tokens"] + new_tokens
        tokens = min(computed + ahead, self._manager.max_model_len)
        changed = {"num_tokens": tokens, "num_tokens_main_model": computed}
        return int(self._count(**by | changed | {"apply_admission_cap": False}))
