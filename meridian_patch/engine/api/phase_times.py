"""Follows the phases of an API server's requests, and observes their times.

All of one step's requests are gone through once, and what they share is gathered: Prometheus is
told a few numbers per step, not one per token.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from meridian_patch.engine.api.guard import ApiGuard
from meridian_patch.engine.api.phase_changes import detach_change
from meridian_patch.phase.progress import ANSWER, THINK, TURNING, PhaseChange, PhaseProgress
from meridian_patch.telemetry import counters

FIELD: Final = "meridian_times"
"""Attribute of vLLM's ``IterationStats`` that holds the times of its outputs."""

FOLLOWING: Final = ApiGuard("phases were not followed; stock's counts stand in for ours")

_PLACES: Final = ((THINK, "think"), (ANSWER, "answer"))


class PhaseTimes:
    """What was observed in one step.

    Attributes:
        values: ``<event>:<label value>`` to observed seconds and how often each was observed.
        gaps: the gaps among them, in the phases ``THINK``, ``ANSWER`` and ``TURNING``.
        tokens: tokens in the phases ``THINK`` and ``ANSWER``.
    """

    def __init__(self) -> None:
        names = ("think", "answer", "ttot")
        self.values: dict[str, dict[float, int]] = {f"{counters.GAP}:{name}": {} for name in names}
        self.gaps = list(self.values.values())
        self.tokens = [0, 0]

    def counts(self) -> dict[str, float]:
        """Tokens by phase: ``<event>:<label value>`` to number."""
        return {f"{counters.TOKENS}:{name}": self.tokens[place] for place, name in _PLACES}

    def ended(self, progress: PhaseProgress) -> None:
        """Observe a request that ended."""
        if progress.place is None:
            return
        self.answered(progress)
        was_in = (progress.has_thought, progress.ttfat_s is not None)
        for place, name in _PLACES:
            if was_in[place]:
                self._observe(f"{counters.PHASE_SECONDS}:{name}", progress.spent_s[place])

    def answered(self, progress: PhaseProgress) -> None:
        """Observe the time to the first answer token, which is final now; once per request."""
        if progress.ttfat_s is not None and not progress.is_told:
            progress.is_told = True
            thought = "yes" if progress.has_thought else "no"
            self._observe(f"{counters.TTFAT}:{thought}", progress.ttfat_s)

    def _observe(self, key: str, seconds: float) -> None:
        values = self.values.setdefault(key, {})
        values[seconds] = values.get(seconds, 0) + 1


def times_of(iteration_stats: Any) -> PhaseTimes:
    """The times of the step that ``iteration_stats`` is of."""
    times: PhaseTimes | None = getattr(iteration_stats, FIELD, None)
    if times is None:
        times = PhaseTimes()
        # Load-bearing: the object has a `__dict__`, and the stat loggers get it after the step.
        setattr(iteration_stats, FIELD, times)
    return times


def follow_outputs(
    states: Mapping[str, Any], outputs: Iterable[Any], now_s: float, iteration_stats: Any
) -> None:
    """Take in one step's outputs before vLLM processes them.

    Args:
        states: the request states by request id.
        outputs: ``EngineCoreOutput`` of the step; changes of phases are taken out of them.
        now_s: the engine's time of the step, in seconds.
        iteration_stats: vLLM's own of the step; None: no times are kept.
    """
    times = None if iteration_stats is None else times_of(iteration_stats)
    for output in outputs:
        change = detach_change(output) if output.kv_transfer_params else None
        state = states.get(output.request_id)
        progress: PhaseProgress | None = getattr(state, "progress", None)
        num_new = len(output.new_token_ids)
        if progress is None or not (num_new or change):
            continue
        try:
            if times is None:
                progress.take(change, num_new)
                continue
            place = progress.place
            last_s, progress.last_s = progress.last_s, now_s
            if place is not None and last_s is not None:
                gap_s = now_s - last_s
                gaps = times.gaps[place]
                gaps[gap_s] = gaps.get(gap_s, 0) + 1
                if place != TURNING:
                    progress.spent_s[place] += gap_s
            if change is not None or place == TURNING:
                arrived_s = state.stats.arrival_time  # type: ignore[union-attr]
                waited_s = iteration_stats.iteration_timestamp - arrived_s
                _take_change(times, progress, change, num_new, waited_s)
            else:
                progress.num_tokens += num_new
                if place is not None:
                    times.tokens[place] += num_new
        except Exception as error:
            # The others' phases are followed all the same.
            progress.lose()
            FOLLOWING.failed(error)


def lose_outputs(states: Mapping[str, Any], outputs: Iterable[Any]) -> None:
    """Take the changes out of a step's outputs that could not be followed at all."""
    for output in outputs:
        progress = getattr(states.get(output.request_id), "progress", None)
        if detach_change(output) is not None and progress is not None:
            progress.lose()


def _take_change(
    times: PhaseTimes,
    progress: PhaseProgress,
    change: PhaseChange | None,
    num_new: int,
    waited_s: float,
) -> None:
    """Take in tokens that may change the phase.

    Args:
        times: of the step.
        progress: the request's.
        change: the phase after the step; None: it is the one before.
        num_new: tokens of the step.
        waited_s: seconds since the request's arrival, on the API server's clock, by which vLLM
            takes the time to the first token.
    """
    num_answer = progress.take(change, num_new)
    if progress.place is None:
        return
    times.tokens[ANSWER] += num_answer
    times.tokens[THINK] += num_new - num_answer
    if num_answer and progress.ttfat_s is None:
        progress.ttfat_s = waited_s
        if progress.has_thought:
            times.answered(progress)
