"""Measures how long each engine step takes."""

from collections import deque
from typing import Any

from meridian_patch.policy.step_time import StepShape

# More steps than any engine keeps in flight.
_MOST_IN_FLIGHT = 64


class StepTimer:
    """Computes the duration of each step from its scheduling time and the arrival of its output.

    With asynchronous scheduling a step waits for the one before it, so it begins when that one
    ends, even if that one was not noted.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[Any, StepShape, float]] = deque(maxlen=_MOST_IN_FLIGHT)
        self._last_end_s = float("-inf")

    def scheduled(self, output: Any, shape: StepShape, now_s: float) -> None:
        """Note a step with at least one token that goes to the workers."""
        self._in_flight.append((output, shape, now_s))

    def ended(self, output: Any, now_s: float) -> tuple[StepShape, float] | None:
        """Shape and seconds of a step whose output arrived; None if the step was not noted.

        Notes of later steps are kept, because their outputs are still to come. Notes of earlier
        steps are dropped, because outputs arrive in the order of their steps.
        """
        before_s, self._last_end_s = self._last_end_s, now_s
        in_flight = self._in_flight
        if not any(noted is output for noted, _, _ in in_flight):
            return None
        while True:
            noted, shape, scheduled_s = in_flight.popleft()
            if noted is output:
                return shape, now_s - max(scheduled_s, before_s)
