"""Decides whether an engine hangs: pure arithmetic over signs of life.

vLLM's ``/health`` answers while its EngineCore is stopped, or hangs in a step: the API server is
another process. What an EngineCore does shows in what requests get, and in its ``/metrics``.
"""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["fine", "ask", "hung"]
Progress = tuple[str, ...]


@dataclass(slots=True)
class Silence:
    """Since when an engine owes requests something and shows no sign of life.

    A sign of life is a byte for a request, or a change of what it reports of its own steps.
    Times are seconds of one clock.

    Attributes:
        is_hung: whether it was found to hang, and has shown no sign of life since.
    """

    is_hung: bool = False
    # None: it owes nothing.
    _since: float | None = field(default=None, repr=False)
    # None: it reports nothing of its steps, so that silence proves nothing.
    _progress: Progress | None = field(default=None, repr=False)

    def begin(self, now: float) -> None:
        """Note that a request waits."""
        if self._since is None:
            self._since = now

    def settle(self) -> None:
        """Note that no request waits any more, and none was given up."""
        self._since = None

    def heard(self, now: float, *, is_waiting: bool) -> None:
        """Note a sign of life.

        Args:
            now: when it came.
            is_waiting: whether any request still waits.
        """
        self.is_hung = False
        self._since = now if is_waiting else None

    def report(self, progress: Progress, now: float, *, is_waiting: bool) -> None:
        """Note what the engine reports of its steps; a change is a sign of life.

        Args:
            progress: samples that move with steps only; empty if it exports none, or was not read.
            now: when they were read.
            is_waiting: whether any request waits.
        """
        if progress and progress != self._progress:
            self._progress = progress
            self.heard(now, is_waiting=is_waiting)

    def verdict(self, now: float, limit_s: float) -> Verdict:
        """What to make of the silence: ``ask`` for a token at half of the limit.

        Args:
            now: the time.
            limit_s: seconds of silence after which an engine hangs; 0: never.
        """
        if self.is_hung:
            return "hung"
        if not limit_s or self._since is None or self._progress is None:
            return "fine"
        silent_s = now - self._since
        if silent_s >= limit_s:
            return "hung"
        return "ask" if silent_s >= limit_s / 2 else "fine"
