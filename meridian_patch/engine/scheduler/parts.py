"""The interface of a scheduler's parts, the plan of a step, and the dispatch of hooks to the parts.

Each hook corresponds to one point in upstream's scheduler. Parts are called in this order:

1. the phase tracker: the others ask it for the phase of a request;
2. the export of metrics: hands over the phases that changed;
3. the balance of ranks: what other ranks do limits the step;
4. the policy, which is several parts of one name (see ``assembly``): limits of the step, and the
   order of waiting and running requests;
5. the KV tiers: the order in which freed blocks are evicted;
6. early exit: probes use what the policy left of the step.

``on_freed`` is called in the opposite order, so that each part still finds the state of the parts
before it.

No part holds another one. What parts let each other know about a step is on its ``StepPlan``, and
what they keep of a request is in its record (``engine.request_state``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine.scheduler.guard import StepGuard
from meridian_patch.policy.step_time import StepShape

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from meridian_patch.engine.scheduler.running_order import ArrivalOrder

_NOTHING = StepShape(0, 0, 0)


@dataclass(slots=True)
class StepPlan:
    """One step, from before it is planned until it is scheduled.

    Limits first, which are applied while upstream schedules the step; None leaves a limit to stock.

    Attributes:
        may_prefill: whether upstream may compute prompts in the step.
        token_budget: tokens of all requests together.
        probe_budget: to which a lowered ``token_budget`` may be raised for one probe; 0: not.
        max_active: requests that may run beside probes.
        num_probes: live probes, which may run beside so many requests.
        seats: requests and probes that may run.
        may_probe: whether the step may have probes: a probe is a prompt to upstream, too, and goes
            behind answers that wait and requests for which room was made.
        arrivals: arrival times to restore after the step, under vLLM's priority policy.
        is_answered_elsewhere: another rank answers, and computes the step together with this one.
        is_contended: requests compete for what the step has, so the policy arranges them.
        num_answers_waiting: preempted answers, which the policy serves before all others.
        now_s: when it was planned, by the scheduler's clock; only while requests compete.
        shape: what it decodes, and the KV context of its requests, as far as known before.
        least_prefill: the least prefill that a lowered budget has room for.
        begun_s: when the policy began to plan it, by the performance counter.
        limits_s: seconds that the policy spent on limits.
        order_s: seconds that it spent on the order of running requests.
        scheduled_s: when it was scheduled, by the scheduler's clock.
        ran: its work, once it was scheduled; None for a step without tokens, or without a policy.
    """

    may_prefill: bool = True
    token_budget: int | None = None
    probe_budget: int = 0
    max_active: int | None = None
    num_probes: int = 0
    seats: int | None = None
    may_probe: bool = True
    arrivals: "ArrivalOrder | None" = None
    is_answered_elsewhere: bool = False
    is_contended: bool = False
    num_answers_waiting: int = 0
    now_s: float = 0.0
    shape: StepShape = _NOTHING
    least_prefill: int = 1
    begun_s: float = 0.0
    limits_s: float = 0.0
    order_s: float = 0.0
    scheduled_s: float = 0.0
    ran: StepShape | None = None

    def drop_cut(self) -> None:
        """Give the step the engine's own budget; requests that were kept out of it stay out."""
        self.token_budget = None

    @property
    def is_cut(self) -> bool:
        """Whether the step has fewer tokens than the engine's own budget."""
        return self.token_budget is not None

    @property
    def prefill_tokens(self) -> int:
        """What a lowered budget leaves to prompts; 0 where it is not lowered."""
        return max((self.token_budget or 0) - self.shape.decode_tokens, 0)

    @property
    def may_admit(self) -> bool:
        """Whether the step may admit waiting requests, as far as it is planned."""
        return self.may_prefill and self.max_active != 0


class Applied:
    """Applies a plan to a scheduler for one step, and restores the scheduler's limits afterwards.

    Args:
        scheduler: upstream's scheduler.
        plan: the limits of the step.
    """

    __slots__ = ("_before", "_plan", "_scheduler")

    def __init__(self, scheduler: "Scheduler", plan: StepPlan) -> None:
        self._scheduler = scheduler
        self._plan = plan
        self._before = scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs

    def __enter__(self) -> None:
        scheduler, (budget, active) = self._scheduler, self._before
        plan = self._plan
        if plan.token_budget is not None:
            scheduler.max_num_scheduled_tokens = min(budget, plan.token_budget)
        most = active if plan.max_active is None else plan.max_active + plan.num_probes
        most = most if plan.seats is None else min(most, plan.seats)
        scheduler.max_num_active_reqs = min(active, most)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        scheduler, (budget, active) = self._scheduler, self._before
        scheduler.max_num_scheduled_tokens = budget
        scheduler.max_num_active_reqs = active
        if self._plan.arrivals is not None:
            self._plan.arrivals.restore()


class SchedulerPart:
    """One concern of the scheduler. Every hook is empty here; a part overrides those it needs.

    Attributes:
        name: used in the log, in the status and as a metric's label. Parts that have one name fail
            together: they are switched off together, and where one raises, the others are not
            called any more in that hook.
    """

    name: str

    def before_added(self, request: "Request", options: RequestOptions) -> None:
        """A request is about to be added, or a session took up its next chunk."""

    def on_added(self, request: "Request", options: RequestOptions) -> None:
        """A new request was added to the scheduler."""

    def on_session_continued(self, session: "Request", options: RequestOptions) -> None:
        """A streaming session took up its next chunk."""

    def on_turn_ended(self, session: "Request") -> None:
        """A streaming session ended its turn; its next chunk may not have arrived yet."""

    def before_schedule(self, plan: StepPlan) -> None:
        """A step is about to be scheduled; the part may change its plan."""

    def after_schedule(
        self, plan: StepPlan, output: "SchedulerOutput", started: Sequence[str]
    ) -> None:
        """A step was scheduled.

        Args:
            plan: its plan.
            output: what upstream made of it.
            started: ids of the requests that it begins or resumes, probes included.
        """

    def after_launch(self, output: "SchedulerOutput") -> None:
        """A step was given to the workers, and the engine goes on."""

    def before_update(
        self, scheduler_output: "SchedulerOutput", model_output: "ModelRunnerOutput"
    ) -> None:
        """A step's output arrived; its tokens are not appended to the requests yet."""

    def after_update(
        self, scheduler_output: "SchedulerOutput", results: "dict[int, EngineCoreOutputs]"
    ) -> None:
        """A step's tokens were appended; ``results`` are its outputs by client."""

    def on_phase_changed(self, request: "Request") -> None:
        """A request's phase changed, or its hand-off is over."""

    def before_preempted(self, request: "Request") -> None:
        """A running request, no probe, is about to be preempted."""

    def on_preempted(self, request: "Request") -> None:
        """A request was preempted and is in the waiting queue."""

    def on_freed(self, request: "Request") -> None:
        """A request is about to leave the scheduler; the tracker has seen its last tokens."""

    def on_probe_preempted(self, probe: "Request") -> None:
        """A probe was preempted."""

    def on_probe_freed(self, probe: "Request") -> None:
        """A probe is about to leave the scheduler."""

    def before_finish(self, request_ids: list[str] | None) -> None:
        """These requests are about to be finished from outside, as by an abort; None: all."""

    def before_cache_reset(self) -> None:
        """All running requests are about to be preempted, and the KV cache emptied."""

    def before_stats(self) -> None:
        """The counters are about to be read."""

    def on_switched_off(self) -> None:
        """The circuit breaker switched this part off; no hook is called from now on."""

    def stand_in(self) -> "SchedulerPart | None":
        """The part that takes the place of this one, which is about to be switched off."""
        return None


_HOOKS = [name for name in vars(SchedulerPart) if name.startswith(("on_", "before_", "after_"))]


class Parts:
    """Calls the hooks of parts under the guard: an exception ends only the call that raised it.

    Args:
        parts: in the order in which they are called.
        guard: the scheduler's guard.

    Attributes:
        off: names of the parts that were switched off.
    """

    def __init__(self, parts: Sequence[SchedulerPart], guard: StepGuard) -> None:
        self._parts = tuple(parts)
        self._guard = guard
        self.off: list[str] = []
        self._hooks: dict[str, list[tuple[str, Callable[..., None]]]] = {}
        self._find_hooks()
        guard.watch({part.name for part in parts})

    def call(self, hook: str, *args: Any, request_id: str | None = None) -> str | None:
        """Call a hook of every part that overrides it; returns the name of one that failed."""
        failed = None
        for name, method in self._hooks[hook]:
            if name is failed:
                continue
            # The same as `protect`, which takes longer: most hooks are called in every step.
            try:
                method(*args)
            except Exception as error:
                failed = name
                self._guard.failed(name, error, request_id)
        return failed

    def switch_off(self, names: Sequence[str]) -> None:
        """Stop calling these parts; if the first (the phase tracker) is among them, stop all."""
        running = [part for part in self._parts if part.name not in self.off]
        stopped = [part for part in running if part.name in names]
        if stopped and stopped[0] is self._parts[0]:
            stopped = running
        left = [part for part in self._parts if part not in stopped]
        for part in stopped:
            with self._guard.protect(part.name):
                stand_in = part.stand_in()
                left += [] if stand_in is None else [stand_in]
        self._parts = tuple(left)
        self._find_hooks()
        self.off += dict.fromkeys(part.name for part in stopped)
        for part in stopped:
            with self._guard.protect(part.name):
                part.on_switched_off()

    def _find_hooks(self) -> None:
        for hook in _HOOKS:
            empty = getattr(SchedulerPart, hook)
            filled = [
                (part.name, getattr(part, hook))
                for part in self._parts
                if getattr(type(part), hook) is not empty
            ]
            self._hooks[hook] = filled[::-1] if hook == "on_freed" else filled
