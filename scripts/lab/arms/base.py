"""What all arms share: they arrange vLLM's own queues before a step, and vLLM schedules it.

No upstream body is copied. An arm gives ranks; the base sorts ``running`` and ``waiting`` by them,
preempts running requests for a waiting one of a better rank, and lowers the step's token budget.
Everything is restored or left as upstream itself leaves it.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from arms.facts import Facts
from arms.step_cut import cut_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as UpstreamScheduler
else:
    UpstreamScheduler = object

# The rank of an answer that goes before all others; the ranks of others begin with 0 or more.
FIRST = (-1,)
Rank = tuple[float, ...]
# Steps from one look at how long requests wait to the next.
_AGE_STEPS = 8


class Arm(UpstreamScheduler):
    """Mixin over vLLM's scheduler. A lower rank is admitted first and preempted last.

    Ranks of waiting requests are compared again where ``reorder`` was called, those of running ones
    with each step.

    Attributes:
        answers_first: answers go before all others and make no room for any. The phase is read
            from the tokens that the engine has delivered.
        cut_factor: while anyone answers, a step may take so many times its time without prefill;
            None: no such limit.
        displaces: running requests are preempted for a waiting one of a better rank, and those of
            the worst rank where KV blocks run out. Otherwise the order of ``running`` is vLLM's.
        aging_s: ``aged`` is called for a request that has waited so long; None: never.
        num_displaced: preemptions that the arm ordered.
    """

    facts: ClassVar[Facts]
    answers_first: bool = False
    cut_factor: float | None = None
    displaces: bool = False
    aging_s: float | None = None

    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The schedulers of a process share it.
        self.scheduler_config = copy.copy(self.scheduler_config)
        self.clock: Callable[[], float] = time.monotonic
        self.answering: set[str] = set()
        self.num_displaced = 0
        # Since when each waiting request waits.
        self._waits_since: dict[str, float] = {}
        self._is_disordered = False
        manager = self.kv_cache_manager.coordinator.single_type_managers[0]
        self._size: int = manager.block_size
        self._blocks: dict[str, list[Any]] = manager.req_to_blocks

    # What an arm overrides.

    def rank(self, request: Any) -> Rank:
        """Of a request, an answer only where answers do not go first; numbers from 0 upwards."""
        return (0,)

    def added(self, request: Any) -> None:
        """A request arrived."""

    def ran(self, request: Any, num_tokens: int) -> None:
        """A request got so many output tokens."""

    def aged(self, request: Any) -> None:
        """A request has waited for ``aging_s``."""

    def left(self, request: Any) -> None:
        """A request finished."""

    def before_step(self) -> None:
        """The queues are about to be sorted."""

    def token_budget(self) -> int | None:
        """Tokens of the next step, or None for the engine's own."""
        if self.cut_factor is None or not self.has_prefill():
            return None
        if not any(request.request_id in self.answering for request in self.running):
            return None
        return cut_tokens(self.facts, self.running, self.cut_factor)

    # What the base does.

    def reorder(self) -> None:
        """Sort the waiting requests again before the next step."""
        self._is_disordered = True

    def has_prefill(self) -> bool:
        """Whether any request that runs or waits has known tokens that are not computed yet."""
        return bool(self.waiting) or any(request.is_prefill_chunk for request in self.running)

    def rank_of(self, request: Any) -> Rank:
        """The rank that requests are compared by."""
        if self.answers_first and request.request_id in self.answering:
            return FIRST
        return self.rank(request)

    def displace(self, requests: Iterable[Any]) -> None:
        """Preempt running requests before the step."""
        for request in requests:
            self.running.remove(request)
            # Load-bearing: the call by which upstream preempts.
            self._preempt_request(request, time.monotonic())
            # Load-bearing: so that a request that resumes in this step is sent as a whole.
            self.prev_step_scheduled_req_ids.discard(request.request_id)
            self.num_displaced += 1
        # Upstream put them at the front, before the request that room is made for.
        self._sort_waiting()

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self._waits_since[request.request_id] = self.clock()
        # Load-bearing: the prompt of a request that does not think ends with the boundary.
        if request.prompt_token_ids[-1] == self.facts.think_end:
            self.answering.add(request.request_id)
        self.added(request)
        self.reorder()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        full = self.max_num_scheduled_tokens
        self.before_step()
        self._age()
        self._sort_running()
        self._sort_waiting()
        budget = self.token_budget()
        if budget is not None:
            self.max_num_scheduled_tokens = max(1, min(full, budget))
        try:
            if self.displaces:
                self._keep_room()
                self._make_room()
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = full
            # Load-bearing: upstream puts requests that it passed over at the front.
            if self.deferred_waiting:
                self.reorder()

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        results = super().update_from_output(*args, **kwargs)
        for of_client in results.values():
            for item in of_client.outputs:
                if self.facts.think_end in item.new_token_ids:
                    self.answering.add(item.request_id)
                    self.reorder()
                request = self.requests.get(item.request_id)
                if request is not None:
                    self.ran(request, len(item.new_token_ids))
        return results

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.answering.discard(request.request_id)
        self._waits_since.pop(request.request_id, None)
        self.left(request)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._waits_since[request.request_id] = self.clock()
        self.reorder()

    def _age(self) -> None:
        if self.aging_s is None or self.current_step % _AGE_STEPS:
            return
        now_s = self.clock()
        for request in self.waiting:
            if now_s - self._waits_since[request.request_id] >= self.aging_s:
                self._waits_since[request.request_id] = now_s
                self.aged(request)
                self.reorder()

    def _sort_running(self) -> None:
        # Load-bearing: the first running requests get tokens first, and the last is preempted
        # first. Sorting is stable: requests of one rank stay in vLLM's own order.
        if self.displaces:
            # Decodes first: otherwise a newcomer's prompt would take the tokens of all that think.
            self.running.sort(key=lambda one: (one.is_prefill_chunk, *self.rank_of(one)))
        elif self.answers_first:
            self.running.sort(key=lambda one: one.request_id not in self.answering)

    def _sort_waiting(self) -> None:
        if self._is_disordered and len(self.waiting) > 1:
            in_order = sorted(self.waiting, key=self.rank_of)
            # Load-bearing: the queue of vLLM's policy "fcfs" is a deque.
            self.waiting.clear()
            self.waiting.extend(in_order)
        self._is_disordered = False

    def _keep_room(self) -> None:
        """Preempt the worst where the blocks of the next step run out: vLLM takes the last."""
        missing = self._num_taken() - self._num_free()
        if missing > 0:
            self.displace(self._victims(missing, FIRST, needs_seat=False))

    def _make_room(self) -> None:
        """Make room for the first waiting request, if requests of a worse rank run."""
        if not self.waiting or not self.running or self._spare_tokens() <= 0:
            return
        newcomer = self.waiting[0]
        # Load-bearing: vLLM admits a request only if all its known tokens fit.
        needed = -(-newcomer.num_tokens // self._size)
        missing = needed + self._num_taken() - self._num_free()
        needs_seat = len(self.running) >= self.max_num_active_reqs
        if missing > 0 or needs_seat:
            self.displace(self._victims(missing, self.rank_of(newcomer), needs_seat=needs_seat))

    def _victims(self, missing: int, rank: Rank, *, needs_seat: bool) -> list[Any]:
        """The worst running requests that hold ``missing`` blocks; none if those above do not.

        Args:
            missing: KV blocks.
            rank: only requests of a worse rank are victims.
            needs_seat: at least one victim is wanted.
        """
        victims: list[Any] = []
        worst = sorted(self.running, key=self.rank_of, reverse=True)
        for request in worst[: -1 if rank == FIRST else None]:
            is_enough = missing <= 0 and (victims or not needs_seat)
            if is_enough or self.rank_of(request) <= rank:
                break
            victims.append(request)
            missing -= len(self._blocks.get(request.request_id, ()))
        return victims if missing <= 0 else []

    def _num_free(self) -> int:
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    def _num_taken(self) -> int:
        """KV blocks that the running requests take in the next step."""
        size, left, taken = self._size, self.max_num_scheduled_tokens, 0
        for request in self.running:
            computed = request.num_computed_tokens
            if not request.is_prefill_chunk:
                left -= 1
                taken += not computed % size
                continue
            end = computed + min(max(left, 0), request.num_tokens - computed)
            left -= end - computed
            taken += max(0, -(-end // size) - len(self._blocks.get(request.request_id, ())))
        return taken

    def _spare_tokens(self) -> int:
        """Tokens of the next step that running requests leave to a newcomer."""
        left = self.max_num_scheduled_tokens - len(self.running)
        for request in self.running:
            if request.is_prefill_chunk:
                left -= request.num_tokens - request.num_computed_tokens
        return left


def build_arm(original: type, mixin: type[Arm], facts: Facts, settings: Mapping[str, Any]) -> type:
    """A subclass of vLLM's scheduler that is this arm with these settings."""
    return type(mixin.__name__, (mixin, original), {"facts": facts, **settings})
