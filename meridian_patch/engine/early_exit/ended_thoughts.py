"""Counts the thoughts that ended, and estimates how many think tokens early exit saves."""

import numpy as np

from meridian_patch.exit.actions import Outcome
from meridian_patch.exit.strategies.base import BUDGET, NATURAL, UNANSWERED
from meridian_patch.policy.output_lengths import LengthHistogram
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters


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

    def unanswered(self, finish_reason: str) -> None:
        """Count a request that ended in its thought, by vLLM's name of why."""
        self._counters.count(counters.UNANSWERED, finish_reason)

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
