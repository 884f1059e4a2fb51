"""Carries out what the exit controllers decide: measures, probes, closes, and reports.

Runs in the EngineCore process. The phase tracker sees each step's tokens first.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.config.schema import ExitConfig
from meridian_patch.engine.early_exit.answer_loops import AnswerLoops
from meridian_patch.engine.early_exit.answer_room import AnswerRoom
from meridian_patch.engine.early_exit.close_checks import CloseChecks, budget_tokens
from meridian_patch.engine.early_exit.exit_reports import ExitReports, leaves_no_answer
from meridian_patch.engine.early_exit.forced_close import ForcedCloses
from meridian_patch.engine.early_exit.probes import Probes
from meridian_patch.engine.early_exit.signal_health import SignalHealth
from meridian_patch.engine.early_exit.signals import PLAN_FIELD, SIGNALS_FIELD, MeasurePlan
from meridian_patch.engine.early_exit.step_signals import StepSignals, rows_of
from meridian_patch.engine.early_exit.trace import ExitTrace
from meridian_patch.engine.early_exit.unavailable import UnavailableEarlyExit
from meridian_patch.engine.early_exit.unsampled import UnsampledThoughts
from meridian_patch.engine.early_exit.watched_request import WatchedRequest
from meridian_patch.exit.actions import NO_OBSTACLES, PASSING, Action, Obstacle, Obstacles
from meridian_patch.exit.controller import ExitController, follow
from meridian_patch.exit.strategies.base import BUDGET, NO_SIGNALS
from meridian_patch.exit.strategies.build import OWN_BOUNDS, is_probing
from meridian_patch.exit.text_breaks import Breaks
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import ROOT
from meridian_patch.phase.tracker import Phase, PhaseTracker, RequestPhase
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

# Python finds names of the module faster than members of an enumeration.
_THINK, _ANSWER = Phase.THINK, Phase.ANSWER


class EarlyExit:
    """Follows the requests that may think, by their tokens and their signals.

    In mode ``observe`` it follows at most ``observed_at_a_time`` requests without options of their
    own. They are chosen when they are first scheduled. Their thinking time is unknown then, so the
    sample is not biased by it. For the other requests only the ends of thoughts are recorded.

    Args:
        config: the engine's configuration; a request may override it.
        boundaries: boundaries of the served model.
        breaks: text breaks of its vocabulary.
        tracker: phases of all requests.
        closings: forces the close sequences.
        checks: checks whether a close would be undone.
        room: where thoughts must be closed for the sake of their answers.
        probes: None if thoughts cannot be probed.
        unable: strategies that cannot be carried out in this engine, and why.
        trace: None if no trace is written.
        is_blind: True if the workers measure nothing. They may also refuse to measure later.
    """

    def __init__(
        self,
        config: ExitConfig,
        boundaries: Boundaries,
        breaks: Breaks,
        tracker: PhaseTracker,
        closings: ForcedCloses,
        checks: CloseChecks,
        room: AnswerRoom,
        probes: Probes | None,
        phase_counters: PhaseCounters,
        unable: Obstacles = NO_OBSTACLES,
        trace: ExitTrace | None = None,
        *,
        is_blind: bool = False,
    ) -> None:
        self.forced_closes = closings
        self.probes = probes
        self._checks, self._room = checks, room
        closings.accepts, closings.gave_up = checks.accepts, self._refused
        self._unable = unable
        self._config = config
        self._may_probe = config.mode == "enforce" and is_probing(config)
        self._boundary_id = boundaries.end[0][0]
        self._longest_marker = max(map(len, (*boundaries.start, *boundaries.end)))
        self._breaks = breaks
        self._tracker = tracker
        self._counters = phase_counters
        self.reports = ExitReports(phase_counters, trace)
        self._answer_loops = AnswerLoops(phase_counters)
        self._trace = trace
        self._watched: dict[str, WatchedRequest] = {}
        # Requests that wait for their first step, which decides whether they are followed.
        self._undecided: dict[str, tuple[Any, RequestPhase]] = {}
        self._unsampled = UnsampledThoughts()
        # Ids of followed requests that are not in their answer phase.
        self._measured: dict[str, None] = {}
        self._signals = StepSignals()
        self._health = SignalHealth(phase_counters, is_blind=is_blind)
        # Probes that ended since the last ``take_ended``.
        self._ended: set[str] = set()

    @property
    def mode(self) -> str:
        """Mode of requests that set none."""
        return self._config.mode

    @property
    def num_watched(self) -> int:
        """Number of requests that are followed."""
        return len(self._watched) + len(self._undecided) + len(self._unsampled)

    @property
    def is_idle(self) -> bool:
        """Whether no request is followed and no report or ended probe is left to handle."""
        return not (self.num_watched or self.reports.outcomes or self._ended)

    @property
    def num_probes(self) -> int:
        """Number of live probes: those that run, and those offered to the next step."""
        return len(self.probes.live) if self.probes is not None else 0

    def added(self, request: Any, options: RequestOptions) -> None:
        """Follow a new request, or a session with its next chunk; the tracker knows it already.

        Args:
            request: the request or session.
            options: its parsed ``meridian_*`` fields.
        """
        name = request.request_id
        self.freed(request)
        # A session's turn may have ended in the step that is being processed: keep its report.
        if not request.resumable:
            self.reports.outcomes.pop(name, None)
        state, sampling = self._tracker.get(name), request.sampling_params
        if state is None or sampling is None:
            return
        config = options.exit_config(self._config)
        if config.mode == "off":
            return
        self._answer_loops.add(request, state, config)
        if config.mode == "observe" and not options.has_exit_options:
            self._undecided[name] = request, state
        else:
            self._measure(request, state, config, has_options=options.has_exit_options)

    def freed(self, request: Any) -> None:
        """Stop following a request that ended, also if its last tokens cannot be processed."""
        name = request.request_id
        self._undecided.pop(name, None)
        self._answer_loops.remove(name)
        cut = self._unsampled.remove(name)
        if cut is not None and leaves_no_answer(request):
            self.reports.unmeasured(name, *cut, self.mode)
            self.reports.unanswered(request)
        watched = self._watched.pop(name, None)
        if watched is None:
            return
        try:
            if name in self._measured:
                self._follow(watched)
                self.reports.cut_short(watched)
            if self._trace is not None:
                self._trace.cut(name, watched.controller)
        finally:
            self._measured.pop(name, None)
            self._end_thought(name)
            self.forced_closes.forget(name)
            if not self._watched:
                self._signals.forget()

    def arrange(
        self, current_step: int, *, may_probe: bool, token_budget: int | None = None
    ) -> None:
        """Prepare closes and probes for a step that is about to be scheduled.

        Args:
            current_step: number of the last step.
            may_probe: whether the step may have probes.
            token_budget: the step's budget if it is lower than the engine's; else None.
        """
        self.forced_closes.arrange(current_step)
        if self.probes is not None:
            self.probes.rest()
            self.probes.share_seats(is_kept=self._keeps_seats)
            if may_probe:
                self.probes.offer(token_budget)

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

    @property
    def _keeps_seats(self) -> bool:
        tracker = self._tracker
        # Requests are measured from their arrival to their answer, and where no prompt and no model
        # opens a thought, none of them ever thinks.
        may_think = tracker.num_thinking > 0 or tracker.has_opened
        return self._may_probe and bool(self._measured) and may_think

    def scheduled(self, output: Any) -> None:
        """Attach the plan of what to measure to a step that was scheduled."""
        if self.probes is not None:
            self.probes.settle(output)
        if self._undecided:
            self._decide(output.num_scheduled_tokens)
        if self._health.is_blind:
            return
        names = self._measured_of(output.num_scheduled_tokens)
        if self.probes is not None:
            names += self.probes.live
        if names:
            plan = MeasurePlan(tuple(names), self._boundary_id)
            # Load-bearing: extra attributes of a `SchedulerOutput` reach the workers.
            setattr(output, PLAN_FIELD, plan)

    def changed(self, name: str) -> None:
        """Handle a change of a request's phase."""
        watched = self._watched.get(name)
        if watched and name not in self._measured and watched.state.phase is _THINK:
            # The request thinks again after an answer. The answer's tokens are skipped.
            watched.seen = watched.state.tokens_before
            self._measured[name] = None
        ended = self._unsampled.ended(name)
        if ended is not None:
            self.reports.unmeasured(name, *ended, self.mode)

    def before_update(self, model_output: Any) -> None:
        """Take a step's signals; its tokens are not appended to the requests yet."""
        self._signals.receive(getattr(model_output, SIGNALS_FIELD, None))

    def after_update(self, scheduled: Mapping[str, int]) -> None:
        """Process a step's tokens, which were appended and seen by the tracker.

        Args:
            scheduled: number of scheduled tokens by request id.
        """
        all_watched, breaks = self._watched, self._breaks
        table, spans = self._signals.table, self._signals.spans
        for name in self._measured_of(scheduled):
            watched = all_watched[name]
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
        self._answer_loops.after_update(scheduled)
        self._signals.over()
        if not self._watched:
            # The last request ended during this step.
            self._signals.forget()
        self._check_health()

    def probe_ended(self, request: Any, *, is_aborted: bool) -> None:
        """Pass the result of a probe that ended to its parent's controller."""
        assert self.probes is not None
        self._ended.add(request.request_id)
        due = self.probes.freed(request.request_id)
        [row] = self._signals.rows(request.request_id, 1)
        watched = self._watched.get(due.parent.request_id)
        if is_aborted or watched is None:
            return
        entropy_nats = row[0]
        is_lost = row is NO_SIGNALS
        self._health.probed(is_lost=is_lost)
        label = "lost" if is_lost else "measured" if isfinite(entropy_nats) else "invalid"
        self._counters.count(counters.PROBE, label)
        self._process_kept(watched)
        action = watched.controller.probed(due.probe, entropy_nats)
        if self._trace is not None:
            self._trace.probed(due.parent.request_id, due.probe, entropy_nats, watched.controller)
        self._act(watched, action)

    def on_probe_preempted(self, request: Any) -> None:
        """Note a preempted probe."""
        assert self.probes is not None
        self.probes.on_preempted(request.request_id)

    def lost(self, obstacles: Obstacles) -> None:
        """Mark strategies that this engine can no longer carry out, and why."""
        self._unable = {**obstacles, **self._unable}
        for watched in self._watched.values():
            watched.cannot(self._unable_of(watched.config))

    def stopped(self) -> UnavailableEarlyExit:
        """What tells requests from now on that no thought is closed, those under way included."""
        unavailable = UnavailableEarlyExit(self._config, Obstacle.STOPPED, tells_all=True)
        for name in self._measured:
            one = self._watched[name]
            unavailable.lost(name, one.config, one.controller.outcome, one.think_tokens)
        return unavailable

    def take_ended(self) -> set[str]:
        """Ids of probes that ended since the last call; they must not appear in outputs."""
        ended, self._ended = self._ended, set()
        return ended

    def _check_health(self) -> None:
        """After a step: stop asking for signals or probes that the workers do not deliver."""
        found = self._health.check(self._signals.refusal, is_probing=self.probes is not None)
        if not found:
            return
        self.lost(found)
        if self.probes is not None:
            self.probes.cancel_all()
            self.probes = None

    def _measure(
        self, request: Any, state: RequestPhase, config: ExitConfig, *, has_options: bool = False
    ) -> None:
        closes_by = self._room.closes_by(request, config)
        controller = ExitController(config, self._breaks, budget_tokens(request), closes_by)
        watched = WatchedRequest(request, controller, state, config, has_options, len(state.known))
        watched.cannot(self._unable_of(config))
        self._watched[request.request_id] = watched
        self._measured[request.request_id] = None

    def _measured_of(self, scheduled: Mapping[str, int]) -> list[str]:
        measured = self._measured
        if len(measured) < len(scheduled):
            return [name for name in measured if name in scheduled]
        return [name for name in scheduled if name in measured]

    def _decide(self, names: Iterable[str]) -> None:
        """Decide for requests in their first step whether they are measured."""
        for name in names:
            request, state = self._undecided.pop(name, (None, None))
            if state is None:
                continue
            if len(self._measured) < self._config.observed_at_a_time:
                self._measure(request, state, self._config)
            else:
                self._unsampled.add(name, state, budget_tokens(request))

    def _process_kept(self, watched: WatchedRequest) -> None:
        if watched.kept:
            # The controller decides nothing at these tokens.
            seen, rows = watched.seen, rows_of(watched.kept)
            watched.kept = []
            watched.seen += len(rows)
            watched.controller.accept(watched.state.known[seen : watched.seen], rows)

    def _follow(self, watched: WatchedRequest) -> None:
        self._process_kept(watched)
        state, seen = watched.state, watched.seen
        num_new = len(state.known) - seen
        if not num_new:
            return
        watched.seen += num_new
        if self.forced_closes.has_begun(watched.request.request_id):
            watched.controller.closing()
        rows = self._signals.rows(watched.request.request_id, num_new)
        before = watched.controller.outcome
        action = follow(watched.controller, state, seen, rows)
        outcome = watched.controller.outcome
        if outcome is not None and outcome is not before:
            watched.forced += self.forced_closes.forced_on(watched.request.request_id)
            self.reports.ended(watched, outcome)
        if self._trace is not None:
            self._trace.looked(watched.request.request_id, watched.controller)
        # With draft tokens, a thought may end and the next one begin within a step.
        if state.phase is not _THINK or outcome is not before:
            self._end_thought(watched.request.request_id)
            watched.due = watched.given_up = None
            watched.num_refused = watched.lines_left = 0
            if outcome is not None and outcome.reason in OWN_BOUNDS:
                self.forced_closes.bar(watched.request)
        if state.phase is _ANSWER:
            self._measured.pop(watched.request.request_id, None)
        else:
            self._measured[watched.request.request_id] = None
        if watched.retries_close(at_line=state.known[-1] in self._breaks.line):
            action = Action(close=watched.given_up)
        self._act(watched, action)
        self.reports.report(watched)

    def _act(self, watched: WatchedRequest, action: Action | None) -> None:
        self._do(watched, action)
        watched.fast_path_until = watched.lines_from = watched.paragraphs_from = 0
        if watched.due is None and watched.request.request_id not in self.forced_closes:
            seen, controller = watched.seen, watched.controller
            watched.fast_path_until = seen + controller.fast_path_tokens
            watched.lines_from = seen + controller.fast_path_line_tokens
            watched.paragraphs_from = seen + controller.fast_path_paragraph_tokens
        if watched.given_up is not None:
            watched.lines_from = 0

    def _do(self, watched: WatchedRequest, action: Action | None) -> None:
        name = watched.request.request_id
        if action is not None:
            if action.close is not None:
                watched.due, watched.due_by = action.close, watched.seen + self._longest_marker
            if action.probe is not None and self.probes is not None:
                prefix = watched.state.tokens_before + action.probe.think_tokens
                self.probes.ask(watched.request, action.probe, prefix)
        # The limit `due_by` is needed because a thought may begin the marker repeatedly.
        is_in_marker = watched.state.match_state != ROOT and watched.seen < watched.due_by
        if watched.due is None or is_in_marker:
            return
        reason, watched.due = watched.due.reason, None
        # vLLM itself closes at `thinking_token_budget`.
        if reason == BUDGET or name in self.forced_closes or not self._may_close(watched):
            return
        if watched.given_up is not None:
            known = watched.not_enforced
            watched.not_enforced = {each: why for each, why in known.items() if each != reason}
        think_tokens = watched.thought_tokens
        is_last = reason in OWN_BOUNDS
        self.forced_closes.begin(
            watched.request, watched.config.wrap_up, think_tokens, is_last=is_last
        )
        if self.probes is not None:
            self.probes.cancel(name)

    def _may_close(self, watched: WatchedRequest) -> bool:
        """Whether nothing that is applied after the masks would undo the close."""
        obstacle = self._checks.obstacle(watched.request, watched.thought_tokens)
        if obstacle is not None:
            self._give_up(watched, obstacle)
        return obstacle is None

    def _refused(self, name: str, obstacle: Obstacle) -> None:
        """Give up a close that had begun, because something would end the request with it."""
        watched = self._watched.get(name)
        if watched is not None:
            watched.was_refused()
            self._give_up(watched, obstacle)

    def _give_up(self, watched: WatchedRequest, obstacle: Obstacle) -> None:
        """Report why a close cannot be carried out; each is counted once, however often tried."""
        if watched.given_up is None:
            self._counters.count(counters.EXIT_GIVEN_UP, obstacle)
        verdict = watched.controller.verdict
        watched.given_up = verdict if obstacle in PASSING else None
        if verdict is not None:
            watched.cannot({verdict.reason: obstacle})

    def _unable_of(self, config: ExitConfig) -> Obstacles:
        """The strategies that are on in ``config`` but that this engine cannot carry out."""
        return {each: why for each, why in self._unable.items() if getattr(config, each)}

    def _end_thought(self, name: str) -> None:
        self.forced_closes.end(name)
        if self.probes is not None:
            self.probes.cancel(name)
