"""What early exit reports of thoughts: to callers, to the counters, and to the trace.

Runs in the EngineCore process. The events of the trace are described in docs/exit-trace.md.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.config.schema import ExitConfig
from meridian_patch.engine.api.exit_summary import attach_all
from meridian_patch.engine.early_exit.close_checks import budget_tokens
from meridian_patch.engine.early_exit.watched_request import WatchedRequest
from meridian_patch.engine.scheduler.parts import SchedulerPart
from meridian_patch.exit.actions import Close, ExitReport, Obstacle, Outcome, Probe
from meridian_patch.exit.strategies.base import (
    BUDGET,
    NATURAL,
    UNANSWERED,
    budget_left,
    own_end,
)
from meridian_patch.exit.strategies.build import STRATEGIES
from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.output_lengths import LengthHistogram
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

logger = init_logger("vllm.meridian_patch")

# Ends by what a request said. Others are faults, or wishes of its client.
_OWN_ENDS = {
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
}


class ExitReports:
    """Records the ends of thoughts.

    Args:
        phase_counters: count them.
        trace: None if no trace is written.

    Attributes:
        outcomes: reports for callers that were not drained yet, by request id.
    """

    def __init__(self, phase_counters: PhaseCounters, trace: "ExitTrace | None") -> None:
        self.outcomes: dict[str, ExitReport] = {}
        self._ends = EndedThoughts(phase_counters)
        self._trace = trace

    def drain(self) -> dict[str, ExitReport]:
        """New reports for callers since the last call, by request id."""
        outcomes = self.outcomes
        if outcomes:
            self.outcomes = {}
        return outcomes

    def ended(self, watched: WatchedRequest, outcome: Outcome) -> None:
        """Record the end of a measured thought."""
        watched.think_tokens += outcome.think_tokens
        self._ends.ended(outcome, watched.config.mode)
        if watched.has_options:
            watched.cannot(outcome.too_soon)
        watched.is_reported = False
        if self._trace is not None:
            self._trace.ended(watched, outcome)

    def ended_unmeasured(self, watched: WatchedRequest) -> None:
        """Record the thought that a change of phase ended, if it did, and that was not measured."""
        state = watched.state
        think_tokens = state.think_tokens_before - watched.think_tokens
        if not think_tokens:
            return
        # What the prompt has of the first thought behind its start marker.
        given_tokens = 0 if watched.think_tokens else state.given_think_tokens
        left = budget_left(budget_tokens(watched.request), given_tokens)
        self._unmeasured(watched, own_end(think_tokens, left), think_tokens)

    def cut_short(self, watched: WatchedRequest) -> None:
        """Record the measured thought in which a request ended, and why it was not closed."""
        request, thought = watched.request, watched.controller.thought
        # An aborted request has no output that could carry a report.
        if request.status == RequestStatus.FINISHED_ABORTED:
            return
        outcome = None
        if _leaves_no_answer(request):
            outcome = watched.controller.end(0, is_answered=False)
        if outcome is not None:
            self.ended(watched, outcome)
            self._ends.unanswered(request)
        elif watched.has_options and thought is not None and thought.verdict is None:
            watched.cannot(thought.too_soon())
        self.report(watched)

    def cut_short_unmeasured(self, watched: WatchedRequest) -> None:
        """Record the thought in which a request ended, if it did, that was not measured."""
        state = watched.state
        if state.phase is Phase.THINK and _leaves_no_answer(watched.request):
            self._unmeasured(watched, UNANSWERED, state.think_tokens - watched.think_tokens)
            self._ends.unanswered(watched.request)

    def report(self, watched: WatchedRequest) -> None:
        """Report news to the caller; the request has tokens in the step that is processed."""
        if not watched.is_reported:
            watched.is_reported = True
            self.outcomes[watched.name] = ExitReport(
                watched.controller.outcome,
                watched.think_tokens,
                watched.not_enforced,
                watched.forced,
            )

    def _unmeasured(self, watched: WatchedRequest, reason: str, think_tokens: int) -> None:
        outcome = Outcome(reason, think_tokens, None, 0, is_measured=False)
        watched.think_tokens += think_tokens
        self.outcomes[watched.name] = ExitReport(outcome, watched.think_tokens)
        self._ends.ended(outcome, watched.config.mode)


def _leaves_no_answer(request: Any) -> bool:
    """Whether a request that is in its thought ends there without an answer.

    A session may go on with its thought in its next turn, and another engine with a request of
    which this one computes the prompt and a single token.
    """
    is_prefill_leg = request.max_tokens == 1 and bool(request.kv_transfer_params)
    return not (request.resumable or is_prefill_leg) and request.status in _OWN_ENDS


class EndedThoughts:
    """Counts each thought when it ends, and what a close of it saved, or would have saved.

    A thought that went on after a verdict shows what a close would have saved. Of a thought
    that was closed it is estimated how much longer it would have gone on: as much as thoughts of
    its length that ended by themselves.
    """

    def __init__(self, phase_counters: PhaseCounters) -> None:
        self._counters = phase_counters
        self._natural = LengthHistogram()

    def ended(self, outcome: Outcome, mode: str) -> None:
        """Take in a thought that ended, and the mode of its request."""
        count = self._counters.count
        count(counters.EXIT, outcome.reason)
        count(counters.THINK_TOKENS, outcome.reason, outcome.think_tokens)
        if outcome.is_measured:
            count(counters.MEASURED, mode)
        if outcome.verdict is not None:
            count(counters.VERDICT, outcome.verdict.reason)
        if outcome.num_invalid:
            count(counters.INVALID, "think", outcome.num_invalid)
        self._estimate(outcome, mode)

    def unanswered(self, request: Any) -> None:
        """Count a request that ended in its thought, by vLLM's name of why."""
        self._counters.count(counters.UNANSWERED, str(request.get_finished_reason()))

    def _estimate(self, outcome: Outcome, mode: str) -> None:
        """Count saved tokens.

        A thought of mode ``enforce`` that went on after its verdict could not be closed: nothing
        would have saved its tokens.
        """
        if outcome.reason == NATURAL:
            self._natural.add(outcome.think_tokens)
        if outcome.reason in {NATURAL, UNANSWERED}:
            if outcome.verdict is not None and mode == "observe":
                saved = max(outcome.think_tokens - outcome.verdict.close_at, 0)
                self._counters.count(counters.SAVED, "observe", saved)
        elif outcome.reason != BUDGET:
            rest = self._natural.remaining(np.array([float(outcome.think_tokens)]))
            if rest is not None:
                self._counters.count(counters.SAVED, "enforce", round(float(rest[0])))


class ExitTrace:
    """Appends to one file; several engine cores may share it.

    Events are buffered until a thought ends, and then written together. If writing fails, that is
    logged once and the trace is off from then on.

    Args:
        path: the file; existing content is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        # Set permanently when writing has failed.
        self._is_closed = False

    def probed(self, watched: WatchedRequest, probe: Probe, entropy_nats: float) -> None:
        """Write a probe's result, which the controller has processed."""
        controller, variance = watched.controller, math.inf
        # A late result may belong to an earlier thought than the current one.
        if controller.thought is not None and probe.thought == controller.num_thoughts:
            variance = controller.thought.eat_variance
        self._add(
            "probe",
            watched,
            probe.thought,
            probe.think_tokens,
            entropy_nats=_number(entropy_nats),
            variance_nats2=_number(variance),
        )
        self.judged(watched)

    def judged(self, watched: WatchedRequest) -> None:
        """Write the controller's verdict, if it is new."""
        thought = watched.controller.thought
        if thought is not None and thought.verdict is not None:
            self._judged(watched, watched.controller.num_thoughts, thought.verdict)

    def ended(self, watched: WatchedRequest, outcome: Outcome) -> None:
        """Write the end of a thought; the next thought may have begun already."""
        controller, verdict = watched.controller, outcome.verdict
        thought = controller.num_thoughts - (controller.thought is not None)
        if verdict is not None:
            self._judged(watched, thought, verdict)
        self._end(watched, thought, outcome.think_tokens, outcome.reason, verdict)

    def cut(self, watched: WatchedRequest) -> None:
        """Write the end of a request; its current thought, if any, is cut off."""
        thought, number = watched.controller.thought, watched.controller.num_thoughts
        if thought is not None:
            self._end(watched, number, thought.think_tokens, None, thought.verdict)

    def _judged(self, watched: WatchedRequest, thought: int, verdict: Close) -> None:
        if watched.traced is not verdict:
            watched.traced = verdict
            think_tokens, fields = verdict.close_at, _fields(verdict)
            self._add("verdict", watched, thought, think_tokens, **fields)

    def _end(
        self,
        watched: WatchedRequest,
        thought: int,
        think_tokens: int,
        reason: str | None,
        verdict: Close | None,
    ) -> None:
        said = None if verdict is None else {"think_tokens": verdict.close_at, **_fields(verdict)}
        self._add("end", watched, thought, think_tokens, reason=reason, verdict=said)
        watched.traced = None
        self._flush()

    def _add(
        self, event: str, watched: WatchedRequest, thought: int, think_tokens: int, **fields: Any
    ) -> None:
        if not self._is_closed:
            head = {"event": event, "request": watched.name, "thought": thought}
            self._lines.append(json.dumps(head | {"think_tokens": think_tokens} | fields) + "\n")

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._is_closed:
            return
        try:
            # Opened each time, so that the file may be moved; unbuffered, so that lines of several
            # engine cores do not mix.
            with self._path.open("ab", buffering=0) as file:
                file.write("".join(lines).encode())
        except OSError as error:
            self._is_closed = True
            logger.error(
                "meridian_patch: exit.trace is off from here on, %s cannot be written: %s",
                self._path,
                error,
            )


class NoEarlyExit(SchedulerPart):
    """Early exit of an engine that has none, or none any more.

    It reports to each request that asks for early exit, once and with its first tokens, that its
    thoughts cannot be closed.

    Args:
        config: early exit settings of the configuration, of a family only where one is known.
        obstacle: why the engine has no early exit.
        is_for_all: requests without options of their own get the report, too, in mode ``enforce``.

    Attributes:
        reports: reports that are still to be sent, by request id.
    """

    name = counters.EARLY_EXIT

    def __init__(self, config: ExitConfig, obstacle: Obstacle, *, is_for_all: bool = False) -> None:
        self._config = config
        self._obstacle = obstacle
        self._is_for_all = is_for_all
        self.reports: dict[str, ExitReport] = {}
        # Requests with a report that ended; their last outputs may be in the current step.
        self._ended: set[str] = set()

    def on_added(self, request: Any, options: RequestOptions) -> None:
        if options.has_exit_options or self._is_for_all:
            self.add(request.request_id, options.exit_config(self._config))

    def on_session_continued(self, session: Any, options: RequestOptions) -> None:
        self.on_added(session, options)

    def on_freed(self, request: Any) -> None:
        if request.request_id in self.reports:
            self._ended.add(request.request_id)

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        if not self.reports:
            return
        names = {each.request_id for batch in results.values() for each in batch.outputs}
        sent = self.reports.keys() & names
        attach_all(results, {name: self.reports[name] for name in sent})
        for name in sent | self._ended:
            self.reports.pop(name, None)
        self._ended.clear()

    def add(
        self, name: str, config: ExitConfig, outcome: Outcome | None = None, think_tokens: int = 0
    ) -> None:
        """Prepare the report of a request that may be under way.

        Args:
            name: the request's unique id.
            config: the settings that hold for the request.
            outcome: how its last thought ended; None: none has ended.
            think_tokens: of its thoughts that have ended.
        """
        if config.mode == "enforce":
            asked = (each.reason for each in STRATEGIES if each.is_on(config))
            obstacles = dict.fromkeys(asked, self._obstacle)
            self.reports[name] = ExitReport(outcome, think_tokens, obstacles)
            self._ended.discard(name)


def _fields(verdict: Close) -> dict[str, Any]:
    return {"reason": verdict.reason, "fired_at": verdict.fired_at, "why": verdict.why}


def _number(value: float) -> float | None:
    # JSON has only finite numbers.
    return value if math.isfinite(value) else None
