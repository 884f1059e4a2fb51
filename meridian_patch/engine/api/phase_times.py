"""Follows the phases of an API server's requests, and observes their times.

All of one step's requests are gone through once, and what they share is gathered: Prometheus is
told a few numbers per step, not one per token.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from vllm.v1.engine import EngineCoreEventType

from meridian_patch.engine import wire
from meridian_patch.engine.api.guard import ApiGuard
from meridian_patch.engine.api.phase_changes import detach_change
from meridian_patch.phase.phase_log import PhaseLog
from meridian_patch.phase.progress import ANSWER, THINK, TURNING, PhaseChange, PhaseProgress
from meridian_patch.telemetry import counters

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

    def add(
        self, tokens: Sequence[int], last_ones: Iterable[Mapping[float | None, int]], now_s: float
    ) -> None:
        """Add outputs that changed no phase.

        Args:
            tokens: of them, by phase.
            last_ones: by phase, when their requests had their last output, and how many then.
            now_s: when they came, in the engine's seconds.
        """
        for place, at_once in enumerate(last_ones):
            self.tokens[place] += tokens[place]
            for last_s, number in at_once.items():
                if last_s is not None:
                    self.add_gaps(place, now_s - last_s, number)

    def add_gaps(self, place: int, gap_s: float, number: int) -> None:
        """Add gaps of equal length."""
        gaps = self.gaps[place]
        gaps[gap_s] = gaps.get(gap_s, 0) + number

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
                self._observe(f"{counters.PHASE_SECONDS}:{name}", progress.seconds_in(place))

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
    times: PhaseTimes | None = getattr(iteration_stats, wire.TIMES, None)
    if times is None:
        times = PhaseTimes()
        # Load-bearing: the object has a `__dict__`, and the stat loggers get it after the step.
        setattr(iteration_stats, wire.TIMES, times)
    return times


def follow_outputs(
    states: Mapping[str, Any],
    outputs: Iterable[Any],
    now_s: float,
    iteration_stats: Any,
    *,
    is_traced: bool = False,
    changes: Mapping[str, PhaseChange] | None = None,
) -> None:
    """Take in one step's outputs before vLLM processes them.

    Args:
        states: the request states by request id.
        outputs: ``EngineCoreOutput`` of the step.
        now_s: the engine's time of the step, in seconds.
        iteration_stats: vLLM's own of the step; None: no times are kept.
        is_traced: whether to log when phases begin and end, for spans.
        changes: of phases in the step, by request id; None: they are taken out of the outputs.
    """
    step = None
    if iteration_stats is not None:
        step = _Step(times_of(iteration_stats), now_s, iteration_stats, is_traced)
    # By phase, how many requests had their last output when: most share it with others.
    last_ones: tuple[dict[float | None, int], ...] = ({}, {})
    tokens = [0, 0]
    for output in outputs:
        if changes is not None:
            change = changes.get(output.request_id)
        else:
            change = detach_change(output) if output.kv_transfer_params else None
        state = states.get(output.request_id)
        progress: PhaseProgress | None = getattr(state, "progress", None)
        num_new = len(output.new_token_ids)
        if progress is None or not (num_new or change):
            continue
        try:
            place = progress.place
            if step is None:
                progress.take(change, num_new)
            elif change is not None or place is None or place == TURNING:
                step.change(state, output, change)
            else:
                # Nearly all outputs of nearly all steps.
                last_s, progress.last_s = progress.last_s, now_s
                progress.num_tokens += num_new
                tokens[place] += num_new
                at_once = last_ones[place]
                at_once[last_s] = at_once.get(last_s, 0) + 1
        except Exception as error:
            # The others' phases are followed all the same.
            progress.lose()
            FOLLOWING.failed(error)
    if step is not None:
        step.times.add(tokens, last_ones, now_s)


class _Step(NamedTuple):
    """One step's outputs: where their times are kept, and when they came.

    Attributes:
        times: of the step.
        now_s: the engine's time.
        stats: vLLM's own of the step.
        is_traced: whether to log when phases begin and end.
    """

    times: PhaseTimes
    now_s: float
    stats: Any
    is_traced: bool

    def change(self, state: Any, output: Any, change: PhaseChange | None) -> None:
        """Take in an output that may change its request's phase."""
        progress: PhaseProgress = state.progress
        before, last_s = progress.place, progress.last_s
        progress.last_s = self.now_s
        if before is not None and last_s is not None:
            self.times.add_gaps(before, self.now_s - last_s, 1)
        num_new = len(output.new_token_ids)
        num_answer = progress.take(change, num_new)
        progress.moved(before, self.now_s)
        if progress.place is None:
            return
        self.times.tokens[ANSWER] += num_answer
        self.times.tokens[THINK] += num_new - num_answer
        # The clock of the API server, by which vLLM takes the time to the first token.
        wall_s = self.stats.iteration_timestamp
        if num_answer and progress.ttfat_s is None:
            progress.ttfat_s = wall_s - state.stats.arrival_time
            if progress.has_thought:
                self.times.answered(progress)
        if self.is_traced:
            log_phase(progress, wall_s, preemptions_of(state, output))


def preemptions_of(state: Any, output: Any) -> int:
    """Preemptions of a request up to an output that vLLM has not processed yet."""
    # Load-bearing: vLLM counts these events when it processes the output that brings them.
    events = output.events or ()
    preempted = sum(event.type == EngineCoreEventType.PREEMPTED for event in events)
    return int(state.stats.num_preemptions) + preempted


def log_phase(progress: PhaseProgress, wall_s: float, preemptions: int) -> None:
    """Log a step that may have changed the phase."""
    if progress.log is None:
        progress.log = PhaseLog()
    progress.log.note(progress, wall_s, preemptions)


def lose_outputs(states: Mapping[str, Any], outputs: Iterable[Any]) -> None:
    """Take the changes out of a step's outputs that could not be followed at all."""
    for output in outputs:
        progress = getattr(states.get(output.request_id), "progress", None)
        if detach_change(output) is not None and progress is not None:
            progress.lose()
