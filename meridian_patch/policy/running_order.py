"""Ranks running requests with answers first."""

from enum import IntEnum
from typing import TYPE_CHECKING

from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.order_policy import RequestView

if TYPE_CHECKING:
    from collections.abc import Mapping


class Standing(IntEnum):
    """Classes of requests in order of service; preemption starts with the last."""

    HANDOFF = 0
    ANSWER = 1
    ANSWER_PREFILLING = 2
    THINK_PROTECTED = 3
    THINK = 4
    PREFILL = 5


class LatencyPolicy:
    """Orders running requests by phase, answers first.

    1. First, requests in their hand-off, that is between the boundary and their first
       ``protected_answer_tokens`` answer tokens.
    2. Then answers; among them, those that recompute tokens after a preemption come last.
    3. Then thinkers that were preempted ``max_preemptions`` times.
    4. Then other thinkers, the one with the most work to lose first: computed tokens without those
       that an offload tier keeps. Equal ones, and all if ``by_work`` is off, keep stock order.
    5. Prefill comes last: new prompts, and thinkers that recompute; most computed tokens first.
    6. Within each class, the requests' own priorities decide first.

    Invariant: an answer is preempted only if no thinker and no prefill is left.

    Args:
        protected_answer_tokens: length of the hand-off, in answer tokens.
        max_preemptions: after so many preemptions a thinker is protected.
        by_work: order thinkers by the work that they would lose.
        keeps_thinking: an offload tier also keeps thinking, so the work to lose does not grow.
    """

    def __init__(
        self,
        protected_answer_tokens: int,
        max_preemptions: int,
        *,
        by_work: bool = True,
        keeps_thinking: bool = False,
    ) -> None:
        self._protected_answer_tokens = protected_answer_tokens
        self._max_preemptions = max_preemptions
        self._by_work = by_work
        self.drift: Mapping[int, int] = (
            {Standing.THINK_PROTECTED: -1, Standing.THINK: -1}
            if by_work and not keeps_thinking
            else {}
        )

    def rank(self, view: RequestView) -> tuple[int, int, int]:
        """The request's class, its priority, and the order of thinkers and prefill by work."""
        standing = self._standing(view)
        if not self._by_work or standing < Standing.THINK_PROTECTED:
            return standing, view.priority, 0
        if standing is Standing.PREFILL:
            return standing, view.priority, -view.num_computed_tokens
        return standing, view.priority, view.num_kept_tokens - view.num_computed_tokens

    def _standing(self, view: RequestView) -> Standing:
        if view.phase is Phase.ANSWER:
            if view.is_prefilling:
                return Standing.ANSWER_PREFILLING
            if view.is_handed_off and view.tokens_in_phase < self._protected_answer_tokens:
                return Standing.HANDOFF
            return Standing.ANSWER
        if view.phase is Phase.PREFILL or view.is_prefilling:
            return Standing.PREFILL
        if view.num_preemptions >= self._max_preemptions:
            return Standing.THINK_PROTECTED
        return Standing.THINK
