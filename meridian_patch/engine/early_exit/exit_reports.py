"""Reports how thoughts ended: to callers, to the counters, and to the trace."""

from typing import Any

from vllm.v1.request import RequestStatus

from meridian_patch.engine.early_exit.ended_thoughts import EndedThoughts
from meridian_patch.engine.early_exit.trace import ExitTrace
from meridian_patch.engine.early_exit.watched_request import WatchedRequest
from meridian_patch.exit.actions import ExitReport, Outcome
from meridian_patch.telemetry.counters import PhaseCounters

# Ends by what a request said. Others are faults, or wishes of its client.
_OWN_ENDS = {
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
}


class ExitReports:
    """Collects the ends of thoughts.

    Args:
        phase_counters: count them.
        trace: None if no trace is written.

    Attributes:
        outcomes: reports for callers that were not drained yet, by request id.
    """

    def __init__(self, phase_counters: PhaseCounters, trace: ExitTrace | None) -> None:
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
        """Take in the end of a thought of a followed request."""
        watched.think_tokens += outcome.think_tokens
        self._ends.ended(outcome, watched.config.mode)
        if watched.has_options:
            watched.cannot(outcome.too_soon)
        watched.is_reported = False
        if self._trace is not None:
            self._trace.ended(watched.request.request_id, outcome, watched.controller)

    def unmeasured(self, name: str, outcome: Outcome, think_tokens: int, mode: str) -> None:
        """Take in the end of a thought that was not measured.

        Args:
            name: its request's id.
            outcome: how it ended.
            think_tokens: of all thoughts of the request that ended.
            mode: of the request.
        """
        self.outcomes[name] = ExitReport(outcome, think_tokens)
        self._ends.ended(outcome, mode)

    def cut_short(self, watched: WatchedRequest) -> None:
        """Report the thought in which a followed request ended, and why it was not closed."""
        # An aborted request has no output that could carry a report.
        if watched.request.status == RequestStatus.FINISHED_ABORTED:
            return
        outcome = None
        if leaves_no_answer(watched.request):
            outcome = watched.controller.end(0, is_answered=False)
        if outcome is not None:
            self.ended(watched, outcome)
            self.unanswered(watched.request)
        elif watched.has_options and watched.controller.verdict is None:
            watched.cannot(watched.controller.too_soon)
        self.report(watched)

    def unanswered(self, request: Any) -> None:
        """Count a request that ended in its thought."""
        self._ends.unanswered(str(request.get_finished_reason()))

    def report(self, watched: WatchedRequest) -> None:
        """Report news to the caller; the request has tokens in the step that is processed."""
        if not watched.is_reported:
            watched.is_reported = True
            self.outcomes[watched.request.request_id] = ExitReport(
                watched.controller.outcome,
                watched.think_tokens,
                watched.not_enforced,
                watched.forced,
            )


def leaves_no_answer(request: Any) -> bool:
    """Whether a request that is in its thought ends there without an answer.

    A session may go on with its thought in its next turn, and another engine with a request of
    which this one computes the prompt and a single token.
    """
    is_prefill_leg = request.max_tokens == 1 and bool(request.kv_transfer_params)
    return not (request.resumable or is_prefill_leg) and request.status in _OWN_ENDS
