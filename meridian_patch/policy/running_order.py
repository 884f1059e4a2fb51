"""Answers first: the default policy."""

from enum import IntEnum
from typing import TYPE_CHECKING

from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.order_policy import RequestView

if TYPE_CHECKING:
    from collections.abc import Mapping


class Standing(IntEnum):
    """Order of service; preemption takes from the end."""

    HANDOFF = 0
    ANSWER = 1
    ANSWER_PREFILLING = 2
    THINK_PROTECTED = 3
    THINK = 4
    PREFILL = 5


class LatencyPolicy:
    """Orders running requests by who waits for them.

    1. A request in its hand-off, that is between the boundary and its first N answer tokens,
       stands before everybody.
    2. Then answers; those that must recompute their tokens after a preemption come last of them.
    3. Then thinkers that were preempted ``max_preemptions`` times.
    4. Then thinkers, the one with the most work to lose first: computed tokens, less those that
       an offload tier keeps. Equal ones, and all with ``by_work`` off, stand in stock order.
    5. Prefill is last: new prompts, and thinkers that recompute; the most computed tokens first.
    6. Within each of these the requests' own priorities come before anything else.

    Invariant: an answer is preempted only when no thinker and no prefill is left.

    Args:
        keeps_thinking: a tier keeps thinking as it goes on, so that what is lost does not grow.
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
        """See the class: standing, the request's priority, and what orders thinkers and prefill."""
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
