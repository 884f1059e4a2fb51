"""How long a request would take alone on the engine: what waiting is measured against."""

from collections.abc import Callable

import numpy as np

from meridian_patch.replay.types import StepWork


class AloneTimes:
    """Times of a request that runs alone in the engine and finds nothing cached.

    Its prompt is computed in chunks, then each step computes one token with all before it.

    Args:
        step_seconds: of the cost model.
        chunk_tokens: most tokens of one step.
    """

    def __init__(self, step_seconds: Callable[[StepWork], float], chunk_tokens: int) -> None:
        self._step_seconds = step_seconds
        self._chunk_tokens = chunk_tokens
        # At index c, the seconds of all decode steps with a context of 1 to c tokens.
        self._decode_s = np.zeros(1)

    def seconds(self, prompt_tokens: int, token: int) -> float:
        """From submission to the output token with this index, counted from 0."""
        return self._prefill(prompt_tokens) + self._decode(prompt_tokens, token)

    def _prefill(self, prompt_tokens: int) -> float:
        seconds = 0.0
        for start in range(0, prompt_tokens, self._chunk_tokens):
            end = min(prompt_tokens, start + self._chunk_tokens)
            attended = sum(range(start + 1, end + 1))
            seconds += self._step_seconds(StepWork(end - start, 0, end, attended))
        return seconds

    def _decode(self, prompt_tokens: int, tokens: int) -> float:
        last = prompt_tokens + tokens
        if last >= len(self._decode_s):
            contexts = range(len(self._decode_s), max(last + 1, 2 * len(self._decode_s)))
            steps = [self._step_seconds(StepWork(0, 1, c, c)) for c in contexts]
            more = self._decode_s[-1] + np.cumsum(steps)
            self._decode_s = np.concatenate([self._decode_s, more])
        return float(self._decode_s[last] - self._decode_s[prompt_tokens])
