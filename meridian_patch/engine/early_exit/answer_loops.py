"""Ends requests whose answers repeat themselves, by vLLM's own check for repetition."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RepetitionDetectionParams

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import Signals
from meridian_patch.exit.strategies.loop import LoopBreaker
from meridian_patch.phase.tracker import Phase, RequestPhase
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

_NO_SIGNALS = Signals((), (), (), ())


@dataclass(slots=True)
class _Answer:
    request: Any
    state: RequestPhase
    config: ExitConfig
    # Of the answer that begins behind so many known tokens; None: it has fired, or there is none.
    breaker: LoopBreaker | None = None
    begin: int = -1
    # Known tokens that the breaker has.
    seen: int = 0


class AnswerLoops:
    """The requests whose answers are looked at: those with ``loop_scope: all``.

    The loop breaker costs little per token, and vLLM's check much. So the breaker looks, and where
    it fires the request gets vLLM's check with the same settings: it ends at its next token if that
    one continues the loop, with vLLM's finish reason ``repetition``. In mode ``observe`` the loop
    is only counted.

    Args:
        phase_counters: count the loops.
    """

    def __init__(self, phase_counters: PhaseCounters) -> None:
        self._counters = phase_counters
        self._answers: dict[str, _Answer] = {}

    def add(self, request: Any, state: RequestPhase, config: ExitConfig) -> None:
        """Look at a request's answers, if its settings ask for it.

        A request with a check of its own is left to that one.
        """
        is_own = request.sampling_params.repetition_detection is not None
        if config.loop and config.loop_scope == "all" and not is_own:
            self._answers[request.request_id] = _Answer(request, state, config)

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._answers.pop(request_id, None)

    def after_update(self, scheduled: Mapping[str, int]) -> None:
        """Look at a step's tokens, which were appended and seen by the tracker.

        Args:
            scheduled: number of scheduled tokens by request id.
        """
        for name, answer in self._answers.items():
            if name in scheduled and answer.state.phase is Phase.ANSWER:
                self._look(answer)

    def _look(self, answer: _Answer) -> None:
        state, config = answer.state, answer.config
        if answer.begin != state.tokens_before:
            answer.begin = answer.seen = state.tokens_before
            answer.breaker = LoopBreaker.of_sizes(config)
        if answer.breaker is None:
            return
        tokens = state.known[answer.seen :]
        answer.seen += len(tokens)
        if answer.breaker.accept(tokens, _NO_SIGNALS, 0) is None:
            return
        answer.breaker = None
        self._counters.count(counters.ANSWER_LOOP, config.mode)
        if config.mode == "enforce":
            self._end(answer.request, config)

    def _end(self, request: Any, config: ExitConfig) -> None:
        # Load-bearing: upstream reads this after each token. In one process the samples of a
        # request share their parameters.
        request.sampling_params = copy(request.sampling_params)
        request.sampling_params.repetition_detection = RepetitionDetectionParams(
            max_pattern_size=config.loop_max_pattern_size,
            min_pattern_size=config.loop_min_pattern_size,
            min_count=config.loop_min_count,
        )
