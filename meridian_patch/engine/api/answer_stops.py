"""Lets a request's stop strings match in its answer only."""

from collections.abc import Sequence
from typing import Any

from meridian_patch.phase.output_phases import OutputPhases


class AnswerStops:
    """A detokenizer of vLLM's whose stop strings match in the answer only.

    1. Each step's tokens are divided by phase. Those of a thought are passed on without stop
       strings, those of an answer with the text of that answer alone. So a stop string that begins
       in the thought and ends in the answer does not match.
    2. A match drops all tokens behind it, also those of later pieces, as upstream does.
    3. Text of a thought is not held back from a stream, because no stop string can begin in it.

    Token ids and text of the whole output are vLLM's own.

    Args:
        detokenizer: vLLM's, of a request with stop strings; it has no output yet.
        phases: of the request's output.
    """

    def __init__(self, detokenizer: Any, phases: OutputPhases) -> None:
        self._detokenizer = detokenizer
        self._phases = phases
        # Length of the text before the current answer, in characters; in a thought, of all text.
        self._begin = 0

    @property
    def output_token_ids(self) -> list[int]:
        """Token ids of the output."""
        return self._detokenizer.output_token_ids

    @property
    def output_text(self) -> str:
        """Text of the output, with what is held back from a stream."""
        return self._detokenizer.output_text

    def num_output_tokens(self) -> int:
        """Number of output tokens."""
        return self._detokenizer.num_output_tokens()

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take in a step's tokens; returns the stop string that matched, or None."""
        first = 0
        for stop, is_answer in self._phases.split(new_token_ids):
            piece = new_token_ids[first:stop]
            is_terminated = stop_terminated and stop == len(new_token_ids)
            pass_on = self._pass_answer if is_answer else self._pass_thought
            stop_string = pass_on(piece, is_terminated)
            if stop_string is not None:
                return stop_string
            first = stop
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """Text to send; the end of an answer that may begin a stop string is held back."""
        inner = self._detokenizer
        held_back = inner.stop_buffer_length
        # Load-bearing: upstream holds back this many characters of whatever text there is.
        inner.stop_buffer_length = min(held_back, max(len(inner.output_text) - self._begin, 0))
        try:
            return inner.get_next_output_text(finished, delta)
        finally:
            inner.stop_buffer_length = held_back

    def continue_with(self, prompt: Sequence[int]) -> None:
        """Take in the next chunk of a streaming session."""
        self._phases.continue_with(prompt)
        self._begin = len(self._detokenizer.output_text)

    def _pass_thought(self, token_ids: list[int], is_terminated: bool) -> str | None:
        inner = self._detokenizer
        # Load-bearing: without stop strings, upstream only detokenizes.
        stop, inner.stop = inner.stop, []
        try:
            inner.update(token_ids, is_terminated)
        finally:
            inner.stop = stop
        self._begin = len(inner.output_text)
        return None

    def _pass_answer(self, token_ids: list[int], is_terminated: bool) -> str | None:
        inner, text = self._detokenizer, self._detokenizer.output_text
        # Load-bearing: upstream appends to this text, searches its end, and may cut it.
        inner.output_text = text[self._begin :]
        try:
            return inner.update(token_ids, is_terminated)
        finally:
            inner.output_text = text[: self._begin] + inner.output_text


def build_detokenizer(detokenizer: Any, phases: OutputPhases | None) -> Any:
    """``detokenizer`` with stop strings in the answer only; unchanged if it has no stop strings.

    Args:
        detokenizer: vLLM's, of a new request.
        phases: of the request's output; None: stop strings match everywhere.
    """
    if phases is None or not getattr(detokenizer, "stop", None):
        return detokenizer
    return AnswerStops(detokenizer, phases)
