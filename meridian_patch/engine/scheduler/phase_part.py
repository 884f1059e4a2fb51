"""Keeps the phase tracker up to date with a scheduler's requests."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine.api.phase_changes import attach_changes
from meridian_patch.engine.request_state import RequestStates
from meridian_patch.engine.scheduler.guard import StepGuard
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.phase.progress import PhaseChange
from meridian_patch.phase.tracker import PhaseTracker
from meridian_patch.telemetry import counters

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class PhasePart(SchedulerPart):
    """Passes the tokens that each request accepted to the tracker.

    Args:
        tracker: phases of all requests.
        states: records of all requests.
        guard: protects the handling of each request separately.
        on_changed: called with the id of a request whose phase changed.
        end_turn: called with a session whose turn ended.
    """

    name = counters.PHASE_TRACKER

    def __init__(
        self,
        tracker: PhaseTracker,
        states: RequestStates,
        guard: StepGuard,
        on_changed: Callable[[str], None],
        end_turn: Callable[[Any], None],
    ) -> None:
        self._tracker = tracker
        self._states = states
        self._guard = guard
        self._on_changed = on_changed
        self._end_turn = end_turn
        # Number of known tokens, by id, of requests whose next tokens the tracker must see.
        self._expected: dict[str, int] = {}
        # Requests of a step in which `expects` raised: they are resynchronized after the step.
        self._lost: Iterable[str] = ()
        # Phases that changed in the step whose output is being processed, by request id.
        self._changes: dict[str, PhaseChange] = {}
        # The same of the step that was processed last.
        self.last_changes: dict[str, PhaseChange] = {}

    def on_added(self, request: Request, options: RequestOptions) -> None:
        if request.resumable:
            self._states.in_turn[self._states.of(request)] = None
        self._track(request)

    def on_session_continued(self, session: Request, options: RequestOptions) -> None:
        self._states.in_turn[self._states.of(session)] = None
        self._track(session)

    def on_freed(self, request: Request) -> None:
        self._tracker.remove(request.request_id)

    def after_schedule(
        self, plan: StepPlan, output: "SchedulerOutput", started: Sequence[str]
    ) -> None:
        # Load-bearing: first tokens come only from requests that a step begins or resumes.
        for request_id in started:
            self._tracker.runs(request_id)

    def before_update(self, scheduler_output: Any, model_output: Any) -> None:
        self._lost = model_output.req_id_to_index
        # Load-bearing: rows of token ids; a request accepts only tokens of its row.
        self._expected = self._tracker.expects(
            model_output.sampled_token_ids, model_output.req_id_to_index
        )
        self._lost = ()

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        while self._expected:
            self.update_phase(next(iter(self._expected)))
        lost, self._lost = self._lost, ()
        for request_id in lost:
            self._resync(request_id)
        self.last_changes, self._changes = self._changes, {}
        if self.last_changes:
            attach_changes(results, self.last_changes)
        # Load-bearing: the status of a session that waits for its next chunk.
        for state in list(self._states.in_turn):
            if state.request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                self._end_turn(state.request)

    def stand_in(self) -> SchedulerPart:
        return LostPhases(self._tracker.ids())

    def on_switched_off(self) -> None:
        self._states.in_turn.clear()
        # Its numbers of requests by phase are still reported.
        self._tracker.clear()

    def update_phase(self, request_id: str) -> None:
        """Pass a request's accepted tokens to the tracker, if the tracker expects them."""
        seen = self._expected.pop(request_id, None)
        if seen is None:
            return
        # As `protect`, which takes longer.
        try:
            if self._tracker.observe(request_id, seen):
                self._changed(request_id)
        except Exception as error:
            self._guard.failed(self.name, error, request_id)
            self._resync(request_id)

    def _resync(self, request_id: str) -> None:
        """Find the phase from all known tokens: an error may have hidden a boundary."""
        with self._guard.protect(self.name, request_id):
            if self._tracker.resync(request_id):
                self._changed(request_id)

    def _changed(self, request_id: str) -> None:
        state = self._tracker.get(request_id)
        if state is not None and self._tracker.has_boundaries:
            self._changes[request_id] = PhaseChange.of(state)
        self._on_changed(request_id)

    def _track(self, request: Request) -> None:
        # Load-bearing: all known tokens of a request, prompt first. Upstream appends accepted
        # tokens to this list object.
        self._tracker.add(request.request_id, request._all_token_ids)


class LostPhases(SchedulerPart):
    """Tells API servers that requests under way are not tracked any more, each once.

    Otherwise thoughts that are open would go on for ever there.

    Args:
        request_ids: ids of the requests that were tracked.
    """

    name = counters.PHASE_TRACKER

    def __init__(self, request_ids: Iterable[str]) -> None:
        self._lost = dict.fromkeys(request_ids, PhaseChange.unknown())
        # Requests that left the scheduler; their last output may still be in this step's.
        self._freed: list[str] = []

    def on_freed(self, request: Request) -> None:
        self._freed.append(request.request_id)

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        freed, self._freed = self._freed, []
        if not self._lost:
            return
        attach_changes(results, self._lost)
        told = [output.request_id for client in results.values() for output in client.outputs]
        for request_id in (*told, *freed):
            self._lost.pop(request_id, None)
