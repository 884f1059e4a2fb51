"""Early exit: follows thoughts, and carries out what is decided on them.

Runs in the EngineCore process. The phase tracker processes each step's tokens first.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.config.schema import ExitConfig, ExitMode
from meridian_patch.engine import wire
from meridian_patch.engine.api.exit_summary import attach_all
from meridian_patch.engine.early_exit.close import ForcedCloses
from meridian_patch.engine.early_exit.close_checks import AnswerRoom, budget_tokens
from meridian_patch.engine.early_exit.probes import Probes
from meridian_patch.engine.early_exit.report import ExitReports, ExitTrace, NoEarlyExit
from meridian_patch.engine.early_exit.signals import (
    MeasurePlan,
    SignalHealth,
    StepSignals,
    rows_of,
)
from meridian_patch.engine.early_exit.watched_request import WatchedRequest
from meridian_patch.engine.probe_request import strip
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.exit.actions import NO_OBSTACLES, Action, Obstacle, Obstacles
from meridian_patch.exit.controller import ExitController, follow
from meridian_patch.exit.strategies.base import BUDGET, NO_SIGNALS
from meridian_patch.exit.strategies.build import OWN_BOUNDS, is_probing
from meridian_patch.exit.text_breaks import Breaks
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import ROOT
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# Python finds names of the module faster than members of an enumeration.
_THINK, _ANSWER = Phase.THINK, Phase.ANSWER


class EarlyExit(SchedulerPart):
    """Follows the requests that may think, by their tokens and their signals.

    In mode ``observe`` it measures at most ``observed_at_a_time`` requests without options of their
    own. They are chosen when they are first scheduled. Their thinking time is unknown then, so the
    sample is not biased by it. Of the other requests only the ends of thoughts are recorded. A step
    with no followed request costs nothing.

    Args:
        scheduler: the phase-aware scheduler.
        config: the engine's configuration; a request may override it.
        boundaries: boundaries of the served model.
        breaks: text breaks of its vocabulary.
        tracker: phases of all requests.
        closes: forces the close sequences.
        room: where thoughts must be closed for the sake of their answers.
        probes: None if thoughts cannot be probed.
        phase_counters: count what happens to thoughts.
        unable: strategies that cannot be carried out in this engine, and why.
        trace: None if no trace is written.
        is_blind: True if the workers measure nothing. They may also refuse to measure later.

    Attributes:
        config: the engine's configuration.
        breaks: text breaks of the served vocabulary.
        requests: all that is followed, by request id.
        measured: the measured requests among them that are not in their answer phase.
        forced_closes: forces the close sequences.
        probes: None if thoughts cannot be probed, or no longer.
        reports: what is reported of thoughts.
        signals: signals of the step that is being processed.
    """

    name = counters.EARLY_EXIT

    def __init__(
        self,
        scheduler: Any,
        config: ExitConfig,
        boundaries: Boundaries,
        breaks: Breaks,
        tracker: PhaseTracker,
        closes: ForcedCloses,
        room: AnswerRoom,
        probes: Probes | None,
        phase_counters: PhaseCounters,
        unable: Obstacles = NO_OBSTACLES,
        trace: ExitTrace | None = None,
        *,
        is_blind: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self.config = config
        self.breaks = breaks
        self.forced_closes = closes
        self.probes = probes
        self.reports = ExitReports(phase_counters, trace)
        self.signals = StepSignals()
        self.requests: dict[str, WatchedRequest] = {}
        self.measured: dict[str, WatchedRequest] = {}
        self._room = room
        self._unable = unable
        self._boundary_id = boundaries.end[0][0]
        self._longest_marker = max(map(len, (*boundaries.start, *boundaries.end)))
        self._tracker = tracker
        self._counters = phase_counters
        self._trace = trace
        self._health = SignalHealth(phase_counters, is_blind=is_blind)
        # Requests that wait for their first step, and those whose answers are looked at for loops.
        self._num_undecided = self._num_looked_at = 0
        # Probes that ended in the step that is being processed.
        self._ended_probes: set[str] = set()
        # Whether there were requests to follow when the step was scheduled, and when it returned.
        self._is_arranged = self._is_returned = False
        self.set_mode(config.mode)

    @property
    def is_idle(self) -> bool:
        """Whether no request is followed and no report or ended probe is left to handle."""
        return not (self.requests or self.reports.outcomes or self._ended_probes)

    @property
    def num_probes(self) -> int:
        """Number of live probes: those that run, and those offered to the next step."""
        return len(self.probes.live) if self.probes is not None else 0

    def on_added(self, request: Any, options: RequestOptions) -> None:
        name = request.request_id
        self.on_freed(request)
        # A session's turn may have ended in the step that is being processed: keep its report.
        if not request.resumable:
            self.reports.outcomes.pop(name, None)
        state, sampling = self._tracker.get(name), request.sampling_params
        if state is None or sampling is None:
            return
        config = options.exit_config(self.config)
        if config.mode == "off":
            return
        closes_by = self._room.closes_by(request, config)
        controller = ExitController(config, self.breaks, budget_tokens(request), closes_by)
        watched = WatchedRequest(request, controller, state, config, options.has_exit_options)
        self._num_looked_at += watched.watch_answers()
        self.requests[name] = watched
        if config.mode == "observe" and not options.has_exit_options:
            self._num_undecided += 1
        else:
            self._measure(watched)

    def set_mode(self, mode: ExitMode) -> None:
        """Follow another mode from now on, in requests to come.

        But for ``enforce``, those that run are not probed and not closed any more, unless a close
        has begun. Requests that set a mode of their own keep it.
        """
        self.config = self.config.model_copy(update={"mode": mode})
        self._may_probe = mode == "enforce" and is_probing(self.config)
        if mode == "enforce":
            return
        for name, watched in self.requests.items():
            state = self._scheduler.request_states.get(name)  # None: a failed hook has left it
            if state is None or state.options.meridian_exit is None:
                watched.stop_acting()
                if self.probes is not None:
                    self.probes.cancel(watched)

    def on_session_continued(self, session: Any, options: RequestOptions) -> None:
        self.on_added(session, options)

    def on_turn_ended(self, session: Any) -> None:
        self.on_freed(session)

    def on_freed(self, request: Any) -> None:
        name = request.request_id
        watched = self.requests.pop(name, None)
        if watched is None:
            return
        self._num_undecided -= watched.is_measured is None
        self._num_looked_at -= watched.answer is not None
        try:
            if name in self.measured:
                self._follow(watched)
                self.reports.cut_short(watched)
            elif watched.is_measured is False:
                self.reports.cut_short_unmeasured(watched)
            if self._trace is not None:
                self._trace.cut(watched)
        finally:
            self.measured.pop(name, None)
            self._end_thought(watched)
            self.forced_closes.forget(watched)
            if not self.requests:
                self.signals.forget()

    def on_phase_changed(self, request: Any) -> None:
        name = request.request_id
        watched = self.requests.get(name)
        if watched is None or name in self.measured:
            return
        if watched.is_measured is False:
            self.reports.ended_unmeasured(watched)
        elif watched.is_measured and watched.state.phase is _THINK:
            # The request thinks again after an answer. The answer's tokens are skipped.
            watched.seen = watched.state.tokens_before
            self.measured[name] = watched

    def before_schedule(self, plan: StepPlan) -> None:
        self._is_arranged = not self.is_idle
        if not self._is_arranged:
            return
        try:
            self.arrange(plan)
        finally:
            # Also after an error: a close may have arranged its request to skip the step.
            plan.num_probes = 0 if self.probes is None else len(self.probes.live)
            plan.seats = self.user_seats(self._scheduler.max_num_active_reqs)

    def after_schedule(
        self, plan: StepPlan, output: "SchedulerOutput", started: Sequence[str]
    ) -> None:
        if not self._is_arranged:
            return
        if self.probes is not None:
            self.probes.settle(output)
        if self._num_undecided:
            self._decide(output.num_scheduled_tokens)
        if self._health.is_blind:
            return
        names = self._measured_of(output.num_scheduled_tokens)
        if self.probes is not None:
            names += self.probes.live
        if names:
            measured = MeasurePlan(tuple(names), self._boundary_id)
            # Load-bearing: extra attributes of a `SchedulerOutput` reach the workers.
            setattr(output, wire.PLAN, measured)

    def before_update(self, scheduler_output: Any, model_output: Any) -> None:
        self._is_returned = not self.is_idle
        if self._is_returned:
            self.signals.receive(getattr(model_output, wire.SIGNALS, None))

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        if not self._is_returned:
            return
        try:
            self.follow_step(scheduler_output.num_scheduled_tokens)
        finally:
            ended, self._ended_probes = self._ended_probes, set()
            try:
                if ended:
                    strip(results, ended)
            finally:
                attach_all(results, self.reports.drain())

    def on_probe_freed(self, probe: Any) -> None:
        assert self.probes is not None
        name = probe.request_id
        self._ended_probes.add(name)
        due = self.probes.freed(name)
        [row] = self.signals.rows(name, 1)
        watched = due.watched
        is_aborted = probe.status == RequestStatus.FINISHED_ABORTED
        if is_aborted or self.requests.get(watched.name) is not watched:
            return
        entropy_nats = row[0]
        is_lost = row is NO_SIGNALS
        self._health.probed(is_lost=is_lost)
        label = "lost" if is_lost else "measured" if isfinite(entropy_nats) else "invalid"
        self._counters.count(counters.PROBE, label)
        self._process_kept(watched)
        action = watched.controller.probed(due.probe, entropy_nats)
        if self._trace is not None:
            self._trace.probed(watched, due.probe, entropy_nats)
        self._act(watched, action)

    def before_finish(self, request_ids: list[str] | None) -> None:
        if self.probes is None:
            return
        # Probes end before their parents: none may end while upstream iterates over the requests.
        if request_ids is None:
            self.probes.cancel_all()
        for watched in filter(None, map(self.requests.get, request_ids or ())):
            self.probes.cancel(watched)

    def before_cache_reset(self) -> None:
        # Before upstream preempts all requests: a preempted probe would compute its whole prompt.
        if self.probes:
            self.probes.recall()

    def stand_in(self) -> SchedulerPart:
        stopped = NoEarlyExit(self.config, Obstacle.STOPPED, is_for_all=True)
        for name, each in self.measured.items():
            stopped.add(name, each.config, each.controller.outcome, each.think_tokens)
        return stopped

    def on_switched_off(self) -> None:
        if self.probes is not None:
            try:
                self.probes.cancel_all()
            finally:
                # Their ends are not reported to this part any more.
                self.probes.forget_all()

    def arrange(self, plan: StepPlan) -> None:
        """Prepare closes and probes for a step that is about to be scheduled."""
        self.forced_closes.arrange(self._scheduler.current_step)
        if self.probes is not None:
            self.probes.rest()
            self.probes.share_seats(is_kept=self._keeps_seats)
            if plan.may_probe:
                budget, most = plan.token_budget, plan.probe_budget
                plan.token_budget = self.probes.offer(budget, plan.arrivals, most)

    def user_seats(self, all_seats: int) -> int | None:
        """How many requests may run, including the offered probes; None: no limit of its own.

        If probes close thoughts, some seats are kept for them, so that a full batch does not keep
        probes out. 0 admits no request; running ones continue.
        """
        if self.forced_closes.skips_adapter:
            return 0
        kept = self.kept_seats(all_seats)
        return all_seats - kept + self.num_probes if kept else None

    def kept_seats(self, all_seats: int) -> int:
        """Number of seats, of ``all_seats``, that requests leave to probes; live ones hold some."""
        probes = self.probes if self._keeps_seats else None
        return 0 if probes is None else probes.kept_seats(all_seats)

    def follow_step(self, scheduled: Mapping[str, int]) -> None:
        """Process a step's tokens, which were appended and processed by the tracker.

        Args:
            scheduled: number of scheduled tokens by request id.
        """
        breaks, table, spans = self.breaks, self.signals.table, self.signals.spans
        for name in self._measured_of(scheduled):
            watched = self.requests[name]
            state, known = watched.state, watched.state.known
            num_known = len(known)
            if (
                num_known < watched.fast_path_until
                and num_known - watched.seen - len(watched.kept) == 1
                and state.phase is _THINK
                and (num_known < watched.lines_from or known[-1] not in breaks.line)
                and (
                    num_known < watched.paragraphs_from
                    or not breaks.ends_paragraph(known[-1], known[-2])
                )
            ):
                watched.kept.append((table, spans.get(name)))
            else:
                self._follow(watched)
        if self._num_looked_at:
            self._look_at_answers(scheduled)
        self.signals.over()
        if not self.measured:
            # The last one ended during this step.
            self.signals.forget()
        self._check_health()

    def lost(self, obstacles: Obstacles) -> None:
        """Mark strategies that this engine can no longer carry out, and why."""
        self._unable = {**obstacles, **self._unable}
        for watched in self.requests.values():
            if watched.is_measured:
                watched.cannot(self._unable_of(watched.config))

    @property
    def _keeps_seats(self) -> bool:
        tracker = self._tracker
        # Requests are measured from their arrival to their answer, and where no prompt and no model
        # opens a thought, none of them ever thinks.
        may_think = tracker.num_thinking > 0 or tracker.has_opened
        return self._may_probe and bool(self.measured) and may_think

    def _look_at_answers(self, scheduled: Mapping[str, int]) -> None:
        for name in scheduled:
            watched = self.requests.get(name)
            if watched is not None and watched.answer and watched.state.phase is _ANSWER:
                watched.look_at_answer(self._counters)

    def _check_health(self) -> None:
        """After a step: stop asking for signals or probes that the workers do not deliver."""
        found = self._health.check(self.signals.refusal, is_probing=self.probes is not None)
        if not found:
            return
        self.lost(found)
        if self.probes is not None:
            self.probes.cancel_all()
            self.probes = None

    def _measure(self, watched: WatchedRequest) -> None:
        watched.is_measured = True
        watched.seen = len(watched.state.known)
        watched.cannot(self._unable_of(watched.config))
        self.measured[watched.name] = watched

    def _measured_of(self, scheduled: Mapping[str, int]) -> list[str]:
        measured = self.measured
        if len(measured) < len(scheduled):
            return [name for name in measured if name in scheduled]
        return [name for name in scheduled if name in measured]

    def _decide(self, names: Iterable[str]) -> None:
        """Decide for requests in their first step whether they are measured."""
        for name in names:
            watched = self.requests.get(name)
            if watched is None or watched.is_measured is not None:
                continue
            self._num_undecided -= 1
            if len(self.measured) < self.config.observed_at_a_time:
                self._measure(watched)
            else:
                watched.is_measured = False

    def _process_kept(self, watched: WatchedRequest) -> None:
        if watched.kept:
            # The controller decides nothing at these tokens.
            seen, rows = watched.seen, rows_of(watched.kept)
            watched.kept = []
            watched.seen += len(rows)
            watched.controller.accept(watched.state.known[seen : watched.seen], rows)

    def _follow(self, watched: WatchedRequest) -> None:
        self._process_kept(watched)
        name, controller = watched.name, watched.controller
        state, seen = watched.state, watched.seen
        num_new = len(state.known) - seen
        if not num_new:
            return
        watched.seen += num_new
        if watched.has_close_begun:
            controller.closing()
        rows = self.signals.rows(name, num_new)
        before = controller.outcome
        action = follow(controller, state, seen, rows)
        outcome = controller.outcome
        if outcome is not None and outcome is not before:
            watched.forced += watched.forced_tokens
            self.reports.ended(watched, outcome)
        if self._trace is not None:
            self._trace.judged(watched)
        # With draft tokens, a thought may end and the next one begin within a step.
        if state.phase is not _THINK or outcome is not before:
            self._end_thought(watched)
            watched.thought_ended()
            if outcome is not None and outcome.reason in OWN_BOUNDS:
                self.forced_closes.bar(watched)
        if state.phase is _ANSWER:
            self.measured.pop(name, None)
        else:
            self.measured[name] = watched
        if watched.retries_close(at_line=state.known[-1] in self.breaks.line):
            action = Action(close=watched.given_up)
        self._act(watched, action)
        self.reports.report(watched)

    def _act(self, watched: WatchedRequest, action: Action | None) -> None:
        self._do(watched, action)
        watched.fast_path_until = watched.lines_from = watched.paragraphs_from = 0
        seen, thought = watched.seen, watched.controller.thought
        if thought is not None and watched.due is None and watched.closing is None:
            watched.fast_path_until = seen + thought.fast_path_tokens
            watched.lines_from = seen + thought.fast_path_line_tokens
            watched.paragraphs_from = seen + thought.fast_path_paragraph_tokens
        if watched.given_up is not None:
            watched.lines_from = 0

    def _do(self, watched: WatchedRequest, action: Action | None) -> None:
        if action is not None:
            if action.close is not None:
                watched.due, watched.due_by = action.close, watched.seen + self._longest_marker
            if action.probe is not None and self.probes is not None:
                prefix = watched.state.tokens_before + action.probe.think_tokens
                self.probes.ask(watched, action.probe, prefix)
        # The limit `due_by` is needed because a thought may begin the marker repeatedly.
        is_in_marker = watched.state.match_state != ROOT and watched.seen < watched.due_by
        if watched.due is None or is_in_marker:
            return
        reason, watched.due = watched.due.reason, None
        # vLLM itself closes at `thinking_token_budget`.
        if reason == BUDGET or watched.closing is not None:
            return
        if self.forced_closes.begin(watched, reason) and self.probes is not None:
            self.probes.cancel(watched)

    def _unable_of(self, config: ExitConfig) -> Obstacles:
        """The strategies that are on in ``config`` but that this engine cannot carry out."""
        return {each: why for each, why in self._unable.items() if getattr(config, each)}

    def _end_thought(self, watched: WatchedRequest) -> None:
        self.forced_closes.end(watched)
        if self.probes is not None:
            self.probes.cancel(watched)
