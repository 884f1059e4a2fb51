"""Multi-level feedback queues on attained service.

Source: FastServe (Wu et al., arXiv 2305.05920), skip-join MLFQ; Corbató et al., 1962, for the rule.
Deviations: service is counted in tokens, one for each output token, because in a batch a token
takes all requests the same time; levels double; a preempted request computes its tokens again,
where FastServe swaps them to the host ahead of time.
"""

from typing import Any

from arms.base import Arm, Rank
from arms.step_cut import decode_seconds
from meridian_patch.replay.types import StepWork


class Mlfq(Arm):
    """Phase-blind: the least attained service goes first; in a level, first come, first served.

    A prompt counts as the output tokens that would take as long, so that a long one joins a lower
    level (skip-join). A request that has waited for ``aging_s`` starts again at the top.

    Attributes:
        first_level: tokens of the highest level; each level below has twice as many.
        counts_prompt: skip-join.
    """

    displaces = True
    aging_s = 30.0
    first_level: int = 512
    counts_prompt: bool = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Output tokens that do not count, less those that the prompt counts as.
        self._uncounted: dict[str, int] = {}

    def level(self, request: Any) -> int:
        """0 up to ``first_level`` tokens of attained service, 1 up to twice as many, and so on."""
        attained = request.num_output_tokens - self._uncounted[request.request_id]
        return int(attained // self.first_level).bit_length()

    def rank(self, request: Any) -> Rank:
        return self.level(request), request.arrival_time

    def added(self, request: Any) -> None:
        self._uncounted[request.request_id] = -self._prompt_service(request)

    def aged(self, request: Any) -> None:
        self._uncounted[request.request_id] = request.num_output_tokens

    def left(self, request: Any) -> None:
        del self._uncounted[request.request_id]

    def _prompt_service(self, request: Any) -> int:
        if not self.counts_prompt:
            return 0
        tokens = request.num_prompt_tokens
        pairs = tokens * (tokens + 1) // 2
        seconds = self.facts.step_seconds(StepWork(tokens, 0, tokens, pairs, 1))
        return int(seconds / decode_seconds(self.facts, 1, tokens))


class MlfqAnswers(Mlfq):
    """The same among thinkers; answers first and never displaced, and the step cut."""

    answers_first = True
    cut_factor = 1.17
    counts_prompt = False
