"""Carries the policy's limits out: how long a step may be, who comes in, who makes room."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from meridian_patch.config.schema import PolicyConfig
from meridian_patch.engine.begun import begun_in
from meridian_patch.engine.forecasts import Forecasts
from meridian_patch.engine.kv_units import KVUnits
from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.engine.readers import Readers
from meridian_patch.engine.room import Room
from meridian_patch.engine.step_timer import StepTimer
from meridian_patch.engine.waiting import WaitingOrder
from meridian_patch.phase.router import PhaseRouter
from meridian_patch.policy.rules import Rules
from meridian_patch.policy.step_cut import CutSettings, StepCut
from meridian_patch.policy.step_time import StepShape, StepTimeModel
from meridian_patch.policy.time_sharing import SharingSettings, TimeSharing
from meridian_patch.policy.wishes import NO_WISHES, Wishes, read_wishes


class StepLimits(NamedTuple):
    """What one step may do; None leaves it to stock."""

    token_budget: int | None = None
    max_active: int | None = None

    def with_seats(self, seats: int | None) -> "StepLimits":
        """The same, and no more than so many requests running; None: as many as ever."""
        if seats is None:
            return self
        active = seats if self.max_active is None else min(seats, self.max_active)
        return self._replace(max_active=active)

    def with_probes(self, count: int) -> "StepLimits":
        """The same, and a place more for each of ``count`` probes; admission counts users alone."""
        if self.max_active is None:
            return self
        return self._replace(max_active=self.max_active + count)


class Steering:
    """Works out and applies the limits of each step.

    Args:
        units: of the KV pool.
        full_tokens: the engine's token budget per step.
        kept_tokens: what a preemption of a request would not lose; None: nothing.

    Attributes:
        clock: seconds of a steady clock.
        waiting_order: places in the scheduler's queue.
    """

    def __init__(
        self,
        rules: Rules,
        config: PolicyConfig,
        router: PhaseRouter,
        units: KVUnits,
        full_tokens: int,
        kept_tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.model = StepTimeModel()
        self.forecasts = Forecasts(router, config.admission_reserve_tokens, units.fixed_tokens)
        self.waiting_order = WaitingOrder(config.aging_s)
        self._pool_tokens = units.pool_tokens
        self._timer = StepTimer()
        self._cut = StepCut(CutSettings.of(config, full_tokens), self.model)
        self._rules = rules
        itl_s = None if config.answer_itl_ms is None else config.answer_itl_ms / 1000
        self._readers = Readers(router, itl_s)
        # Of live requests that ask for something.
        self._wishes: dict[str, Wishes] = {}
        # Live requests whose prompt must not be computed in pieces for our sake.
        self._unchunkable: set[str] = set()
        self._sharing = None
        if rules.time_sharing:
            self._sharing = TimeSharing(SharingSettings.of(config), self.model)
        self._room = None
        if rules.admission or rules.time_sharing:
            self._room = Room(
                self.forecasts,
                self.waiting_order,
                self._sharing,
                router,
                units.pool_tokens * config.admission_overcommit,
                config.aging_s,
                is_forecasting=rules.admission,
                kept_tokens=kept_tokens,
            )
        self._shape = StepShape(0, 0, 0)
        # Requests whose known tokens are being computed, in the order in which they were admitted.
        self._prefilling: list[Any] = []
        self._budget: int | None = None

    def asks(self, request: Any) -> None:
        """A request is about to come in.

        Raises:
            ConfigError: it asks for something that does not exist; it is served all the same.
        """
        sampling = request.sampling_params
        # Load-bearing: the CPU build's model runner V1 fails on a chunk of a request with a seed,
        # and the engine with it. Its generators have no offset to set back.
        if sampling and sampling.seed is not None and current_platform.is_cpu():
            self._unchunkable.add(request.request_id)
        wishes = read_wishes(sampling.extra_args) if sampling else NO_WISHES
        self._wishes.pop(request.request_id, None)  # of a session's earlier chunk
        if wishes != NO_WISHES:
            self._wishes[request.request_id] = wishes
        if wishes.priority and self._rules.order:
            # Load-bearing: upstream looks at it where it schedules by priority, and only there.
            request.priority = wishes.priority
        bounds = (wishes.max_think_tokens, getattr(sampling, "thinking_token_budget", None))
        known = [bound for bound in bounds if bound is not None]
        if known:
            self.forecasts.limit(request.request_id, min(known))

    def arrived(self, request: Any, waiting: Any) -> None:
        """A request came in, and is in ``waiting`` unless upstream holds it back."""
        if self._rules.are_all_off:
            return
        wishes = self._wishes.get(request.request_id, NO_WISHES)
        priority = wishes.priority if self._rules.order else 0
        self.waiting_order.arrived(request, waiting, priority, self.clock())

    def changed(self, request: Any) -> None:
        """The request's phase may have changed."""
        name = request.request_id
        self._readers.changed(name, self._wishes.get(name, NO_WISHES), self.clock())

    def pauses(self, session: Any) -> None:
        """A session waits for its next chunk; its answer so far is over."""
        self._readers.left(session.request_id)

    def left(self, request: Any) -> None:
        """A request is gone, finished or aborted."""
        self.forecasts.left(request, is_whole=request.status != RequestStatus.FINISHED_ABORTED)
        self._readers.left(request.request_id)
        self._wishes.pop(request.request_id, None)
        self._unchunkable.discard(request.request_id)
        self.waiting_order.left(request)
        if self._room:
            self._room.left(request)

    def preempted(self, request: Any) -> None:
        """A request was preempted, and waits."""
        self.waiting_order.preempted(request)
        if self._room:
            self._room.preempted(request, self.clock())

    def plan(self, scheduler: Any) -> StepLimits:
        """Limits of the next step; may displace a running request."""
        now_s = self.clock()
        max_active = self._room.max_active(scheduler, now_s) if self._room else None
        decode_rows = len(scheduler.running) - self.num_prefilling()
        self.decodes(scheduler, decode_rows)
        if self._rules.step_cut and self._readers and not self._unchunkable:
            before = self._tokens_before(scheduler)
            target_s = self._target_s(now_s)
            budget = self._cut.token_budget(self._shape, before, target_s, now_s)
            # Load-bearing: a step's drafts count as its tokens.
            self._budget = budget + decode_rows * scheduler.num_spec_tokens
        return StepLimits(self._budget, max_active)

    def num_prefilling(self) -> int:
        """Running requests of whose known tokens some are to be computed."""
        if self._prefilling:
            # Load-bearing: True while a scheduled chunk leaves known tokens uncomputed.
            self._prefilling = [
                request
                for request in self._prefilling
                if request.is_prefill_chunk and request.status == RequestStatus.RUNNING
            ]
        return len(self._prefilling)

    def decodes(self, scheduler: Any, rows: int) -> None:
        """So many requests decode in the next step; nothing else is decided of it yet."""
        held = int(scheduler.kv_cache_manager.usage * self._pool_tokens)
        self._shape = StepShape(0, rows, held)
        self._budget = None

    def _tokens_before(self, scheduler: Any) -> int:
        """What stands before the next chunk, or may at most."""
        if self._prefilling:
            return int(self._prefilling[0].num_computed_tokens)
        # How much of it is cached is not known before it is scheduled. Nearly all may be: what
        # was preempted often is. Where nothing is, its first chunk is smaller than need be.
        return int(scheduler.waiting.peek_request().num_tokens) if scheduler.waiting else 0

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """The step is on its way."""
        total = output.total_num_scheduled_tokens
        if not total:
            return
        begun = [scheduler.requests[name] for name in begun_in(output)]
        if any(isinstance(request, ProbeRequest) for request in begun):
            # A few tokens at a step's whole price: the fit would take all prefill to be as dear.
            self._prefilling += [each for each in begun if not isinstance(each, ProbeRequest)]
            return
        now_s = self.clock()
        is_used_up = self._budget is not None and total >= self._budget
        self._cut.ran(is_used_up=is_used_up, now_s=now_s)
        prefill = attended = 0
        self._prefilling += begun
        for request in self._prefilling:
            tokens = output.num_scheduled_tokens.get(request.request_id, 0)
            prefill += tokens
            # Load-bearing: the scheduled tokens already count as computed.
            attended += tokens * (2 * request.num_computed_tokens - tokens + 1) // 2
        shape = StepShape(prefill, total - prefill, self._shape.context_tokens, attended)
        self._timer.scheduled(output, shape, now_s)

    def ended(self, output: Any) -> None:
        """The step's output is back."""
        now_s = self.clock()
        timed = self._timer.ended(output, now_s)
        if timed is not None:
            self.model.observe(*timed)
        if self._sharing:
            self._sharing.advance(now_s)

    def _target_s(self, now_s: float) -> float | None:
        # Without prefill nobody reads what the prompts under way hold.
        held = sum(request.num_computed_tokens for request in self._prefilling)
        context = max(self._shape.context_tokens - held, 0)
        default_s = self._cut.default_itl_s(self._shape._replace(context_tokens=context))
        if default_s is None:
            return None
        if self._rules.pacing:
            return self._readers.due_s(default_s, now_s)
        return self._readers.target_s(default_s)


@contextmanager
def limited(scheduler: Any, limits: StepLimits) -> Iterator[None]:
    """Apply the limits for the length of one step."""
    budget, active = scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs
    try:
        if limits.token_budget is not None:
            scheduler.max_num_scheduled_tokens = min(budget, limits.token_budget)
        if limits.max_active is not None:
            scheduler.max_num_active_reqs = min(active, limits.max_active)
        yield
    finally:
        scheduler.max_num_scheduled_tokens = budget
        scheduler.max_num_active_reqs = active
