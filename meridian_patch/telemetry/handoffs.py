"""Counts what becomes of requests whose thought has ended, in the API server."""

from typing import Final

from meridian_patch.telemetry import counters

# Beyond the largest bucket of the histogram all are alike.
_MOST_S: Final = 60.0


class Handoffs:
    """Counts since the last ``drain``."""

    def __init__(self) -> None:
        self._events: dict[str, float] = {}
        self._gaps: dict[float, int] = {}

    def ended(self, outcome: str) -> None:
        """Count a request that moved, came back, or left in between."""
        self._count(f"{counters.HANDOFFS}:{outcome}")

    def stays(self, reason: str) -> None:
        """Count a request that cannot move."""
        self._count(f"{counters.STAYS}:{reason}")

    def gap(self, seconds: float) -> None:
        """Count the time from the end of a thought to the first token of the answer."""
        # In milliseconds: without vLLM's statistics nothing drains them.
        at_s = round(min(seconds, _MOST_S), 3)
        self._gaps[at_s] = self._gaps.get(at_s, 0) + 1

    def drain(self) -> tuple[dict[str, float], dict[str, dict[float, int]]]:
        """Counts, and observed seconds, as ``PhaseMetrics`` records and observes them."""
        events, self._events = self._events, {}
        gaps, self._gaps = self._gaps, {}
        return events, {f"{counters.HANDOFF_GAP}:answer": gaps} if gaps else {}

    def _count(self, key: str) -> None:
        self._events[key] = self._events.get(key, 0) + 1


OF_THIS_PROCESS = Handoffs()
"""Of this API server: its clients of EngineCore count, and its exporter drains."""
