"""Measures how long each engine step takes, and finds out up to which size a graph runs it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config import CUDAGraphMode

from meridian_patch.engine import wire
from meridian_patch.policy.step_time import StepShape

# More steps than any engine keeps in flight.
_MOST_IN_FLIGHT = 64


@dataclass(slots=True)
class _Noted:
    """A step in flight.

    Attributes:
        output: upstream's ``SchedulerOutput``.
        shape: its work.
        scheduled_s: when it was scheduled.
        launched_s: when the worker had launched it; None where that was not seen.
        launch_s: seconds of its launch for which the output of the step before was late.
    """

    output: Any
    shape: StepShape
    scheduled_s: float
    launched_s: float | None = None
    launch_s: float = 0.0


class StepTimer:
    """Computes the duration of each step from its scheduling time and the arrival of its output.

    With asynchronous scheduling a step waits for the one before it, so it begins when that one
    ends, even if that one was not noted.

    A step that no captured graph runs is launched kernel by kernel. A worker in EngineCore's
    process blocks the engine while it does so, and the output of the step before is taken
    afterwards. If the launch took longer than the wait that followed, and than the step before was
    expected to take, the difference counts for the step that was launched.

    Args:
        expected_s: seconds of a step of some shape; None where that is not known.
    """

    def __init__(self, expected_s: Callable[[StepShape], float | None]) -> None:
        self._expected_s = expected_s
        self._in_flight: deque[_Noted] = deque(maxlen=_MOST_IN_FLIGHT)
        self._last_end_s = float("-inf")

    def scheduled(self, output: Any, shape: StepShape, now_s: float) -> None:
        """Note a step with at least one token that goes to the workers."""
        self._in_flight.append(_Noted(output, shape, now_s))

    def launched(self, output: Any, now_s: float) -> None:
        """Note that the workers have been given a step, and that the engine goes on."""
        if not self._in_flight or self._in_flight[-1].output is not output:
            return
        noted = self._in_flight[-1]
        # If another step's output was taken meanwhile, the engine waited for that, too.
        if self._last_end_s <= noted.scheduled_s:
            noted.launched_s = now_s

    def ended(self, output: Any, now_s: float) -> tuple[StepShape, float] | None:
        """Shape and seconds of a step whose output arrived; None if the step was not noted.

        Notes of later steps are kept, because their outputs are still to come. Notes of earlier
        steps are dropped, because outputs arrive in the order of their steps.
        """
        before_s, self._last_end_s = self._last_end_s, now_s
        in_flight = self._in_flight
        if not any(noted.output is output for noted in in_flight):
            return None
        while True:
            noted = in_flight.popleft()
            if noted.output is output:
                seconds = now_s - max(noted.scheduled_s, before_s) + noted.launch_s
                return noted.shape, seconds - self._late_s(noted.shape, seconds, now_s)

    def _late_s(self, shape: StepShape, seconds: float, now_s: float) -> float:
        """For how long the output that arrived waited for the launch of the next step."""
        following = self._in_flight[0] if self._in_flight else None
        if following is None or following.launched_s is None:
            return 0.0
        launch_s = following.launched_s - following.scheduled_s
        if launch_s <= now_s - following.launched_s:
            return 0.0
        expected_s = self._expected_s(shape) or 0.0
        # The device ran the step while the next one was launched.
        following.launch_s = max(min(launch_s, seconds) - expected_s, 0.0)
        return following.launch_s


def graph_tokens(vllm_config: Any) -> int | None:
    """Most tokens of a step with prompts that a captured graph runs; None: graphs run none."""
    more = vllm_config.additional_config
    if isinstance(more, dict) and wire.GRAPH_TOKENS in more:
        return int(more[wire.GRAPH_TOKENS])
    compilation = vllm_config.compilation_config
    # Load-bearing: a mode whose mixed mode is NONE captures steps that only decode.
    mode = compilation.cudagraph_mode
    if mode is None or mode.mixed_mode() == CUDAGraphMode.NONE:
        return None
    # Load-bearing: a step of more tokens than this is launched kernel by kernel.
    most = compilation.max_cudagraph_capture_size
    return int(most) if most else None
