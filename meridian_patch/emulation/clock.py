"""The clock of an emulated device. It runs one step at a time, each for as long as it costs."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Window:
    """When a device runs one step; seconds of the caller's clock.

    Attributes:
        submit_s: when the engine gave it to the device.
        start_s: when the device began it.
        due_s: when its output is there.
    """

    submit_s: float
    start_s: float
    due_s: float

    @property
    def is_overlapped(self) -> bool:
        """The engine submitted it while the device ran an earlier step."""
        return self.start_s > self.submit_s


class DeviceClock:
    """Gives each step its window.

    Attributes:
        free_at_s: when the last submitted step ends.
    """

    def __init__(self) -> None:
        self.free_at_s = -inf

    def submit(self, now_s: float, cost_s: float) -> Window:
        """Window of a step that is submitted now and takes ``cost_s`` seconds."""
        start_s = max(self.free_at_s, now_s)
        self.free_at_s = start_s + cost_s
        return Window(now_s, start_s, self.free_at_s)
