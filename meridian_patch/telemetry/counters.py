"""Counts the scheduler's events in EngineCore; the API server exports them."""

from collections.abc import Iterable
from enum import StrEnum


class Fallback(StrEnum):
    """What went wrong in a step."""

    EXCEPTION = "exception"
    SLOW = "slow"
    KV_INTEGRITY = "kv_integrity"


class LeftOut(StrEnum):
    """Why a thought was closed without its wrap-up."""

    TEXT = "text"
    STOP = "stop"
    UNDONE = "undone"
    ROOM = "room"
    RESTART = "restart"


class PhaseCounters:
    """Event counts since the last ``drain``; names are ``<event>:<label>``.

    EngineCore sends the counts of a step to one API server. They are differences, so that their
    sums are right with several API servers.
    """

    def __init__(self) -> None:
        self._events: dict[str, float] = {}
        # Totals since the start, for the status report and tests.
        self.totals: dict[str, float] = {}
        # Requests by phase, as last drained.
        self._requests: dict[str, int] = {}

    def count(self, event: str, label: str, number: float = 1) -> None:
        """Count ``number`` events, tokens or seconds."""
        key = f"{event}:{label}"
        self._events[key] = self._events.get(key, 0) + number
        self.totals[key] = self.totals.get(key, 0) + number

    def spend(self, event: str, label: str, seconds: float) -> None:
        """Count time that this machine took; it is no total, so that those of equal runs agree."""
        key = f"{event}:{label}"
        self._events[key] = self._events.get(key, 0) + seconds

    def drain(self) -> dict[str, float]:
        """Events since the last call."""
        events, self._events = self._events, {}
        return events

    def drain_with(
        self, entered: Iterable[tuple[str, int]], requests: Iterable[tuple[str, int]]
    ) -> dict[str, float]:
        """Events since the last call, with the counts of a phase tracker.

        Args:
            entered: how often each phase was entered since the last call.
            requests: the number of requests in each phase now; added only if it changed.
        """
        events = self.drain()
        for phase, number in entered:
            events[f"{PHASE_CHANGE}:{phase}"] = number
        now = dict(requests)
        if now != self._requests:
            self._requests = now
            for phase, number in now.items():
                events[f"{REQUESTS}:{phase}"] = number
        return events


# Names of events. ``metrics.METRICS`` describes each.
PREEMPTION = "preemption"
FALLBACK = "fallback"
PART_OFF = "part_off"
SWITCHED = "switched"
PHASE_CHANGE = "phase_change"
EVICTION = "kv_eviction"
HANDOFFS = "handoffs"
STAYS = "handoff_stays"
HANDOFF_GAP = "handoff_gap"
HIT_TOKENS = "kv_hit_tokens"
EXIT = "exit"
THINK_TOKENS = "think_tokens"
UNANSWERED = "unanswered"
ANSWER_LOOP = "answer_loop"
VERDICT = "exit_verdict"
MEASURED = "measured"
PROBE = "probe"
PROBING_STOPPED = "probing_stopped"
EXIT_GIVEN_UP = "exit_given_up"
WRAP_UP_LEFT_OUT = "wrap_up_left_out"
INVALID = "invalid_signals"
IGNORED_FIELD = "ignored_field"
STEP = "step"
STEP_SECONDS = "step_seconds"
LIMITED = "limited_step"
POLICY_SECONDS = "policy_seconds"
RECOMPUTED = "recomputed_tokens"
TICKET = "ticket"
SAVED = "estimated_saved"
# A gauge: how many requests are in each phase now.
REQUESTS = "requests"
# A gauge that is 1: the label is the package's version.
INFO = "info"
# Observed in the API server, from the outputs of its own requests.
TTFAT = "ttfat"
GAP = "gap"
PHASE_SECONDS = "phase_seconds"
TOKENS = "tokens"

# Parts of the scheduler, as labels.
PHASE_TRACKER, METRICS_EXPORT, BALANCE, POLICY, KV_TIERS, EARLY_EXIT, HANDOFF = PARTS = (
    "the phase tracker",
    "the export of metrics",
    "the balance of ranks",
    "the policy",
    "the KV tiers",
    "early exit",
    "the hand-off",
)

# Label of hit tokens whose blocks other requests were using; the other labels are tiers.
IN_USE = "in_use"
