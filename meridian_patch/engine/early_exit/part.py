"""Connects early exit to the scheduler's hooks."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine.api.exit_summary import attach_all
from meridian_patch.engine.early_exit.manager import EarlyExit
from meridian_patch.engine.early_exit.probes import strip
from meridian_patch.engine.early_exit.unavailable import UnavailableEarlyExit
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.telemetry import counters


class EarlyExitPart(SchedulerPart):
    """Passes the scheduler's hooks to early exit; a step with no followed request does nothing.

    Args:
        scheduler: the phase-aware scheduler.
        early_exit: early exit of the engine.
    """

    name = counters.EARLY_EXIT

    def __init__(self, scheduler: Any, early_exit: EarlyExit) -> None:
        self._scheduler = scheduler
        self._early_exit = early_exit
        # Whether there were requests to follow when the step was scheduled, and when it returned.
        self._is_arranged = self._is_returned = False

    def on_added(self, request: Any, options: RequestOptions) -> None:
        self._early_exit.added(request, options)

    def on_session_continued(self, session: Any, options: RequestOptions) -> None:
        self._early_exit.added(session, options)

    def on_turn_ended(self, session: Any) -> None:
        self._early_exit.freed(session)

    def on_freed(self, request: Any) -> None:
        self._early_exit.freed(request)

    def on_phase_changed(self, request: Any) -> None:
        self._early_exit.changed(request.request_id)

    def on_probe_freed(self, probe: Any) -> None:
        is_aborted = probe.status == RequestStatus.FINISHED_ABORTED
        self._early_exit.probe_ended(probe, is_aborted=is_aborted)

    def on_probe_preempted(self, probe: Any) -> None:
        self._early_exit.on_probe_preempted(probe)

    def before_schedule(self, plan: StepPlan) -> None:
        early_exit = self._early_exit
        self._is_arranged = not early_exit.is_idle
        if not self._is_arranged:
            return
        try:
            early_exit.arrange(
                self._scheduler.current_step,
                may_probe=plan.may_probe,
                token_budget=plan.token_budget,
            )
        finally:
            # Also after an error: a close may have arranged its request to skip the step.
            if plan.max_active is not None:
                # The admission limit does not include probes.
                plan.max_active += early_exit.num_probes
            seats = early_exit.user_seats(self._scheduler.max_num_active_reqs)
            if seats is not None:
                plan.limit_active(seats)

    def after_schedule(self, output: Any, started: Sequence[str]) -> None:
        if self._is_arranged:
            self._early_exit.scheduled(output)

    def before_update(self, scheduler_output: Any, model_output: Any) -> None:
        self._is_returned = not self._early_exit.is_idle
        if self._is_returned:
            self._early_exit.before_update(model_output)

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        if not self._is_returned:
            return
        early_exit = self._early_exit
        try:
            early_exit.after_update(scheduler_output.num_scheduled_tokens)
        finally:
            try:
                ended = early_exit.take_ended()
                if ended:
                    strip(results, ended)
            finally:
                attach_all(results, early_exit.reports.drain())

    def before_finish(self, request_ids: list[str] | None) -> None:
        probes = self._early_exit.probes
        if probes is None:
            return
        # Probes end before their parents: none may end while upstream iterates over the requests.
        if request_ids is None:
            probes.cancel_all()
        for request_id in request_ids or ():
            probes.cancel(request_id)

    def before_cache_reset(self) -> None:
        # Before upstream preempts all requests: a preempted probe would compute its whole prompt.
        if self._early_exit.probes:
            self._early_exit.probes.recall()

    def stand_in(self) -> SchedulerPart:
        return UnavailablePart(self._early_exit.stopped())

    def on_switched_off(self) -> None:
        scheduler, probes = self._scheduler, self._early_exit.probes
        scheduler.early_exit = None
        scheduler.step_limiter.probes = None
        if probes is not None:
            probes.cancel_all()


class UnavailablePart(SchedulerPart):
    """Tells requests that ask for early exit that this engine has none."""

    name = counters.EARLY_EXIT

    def __init__(self, unavailable: UnavailableEarlyExit) -> None:
        self._unavailable = unavailable

    def on_added(self, request: Any, options: RequestOptions) -> None:
        self._unavailable.added(request, options)

    def on_session_continued(self, session: Any, options: RequestOptions) -> None:
        self._unavailable.added(session, options)

    def on_freed(self, request: Any) -> None:
        self._unavailable.freed(request)

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        self._unavailable.report(results)
