"""Ranks running requests with answers first."""

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, Protocol

from meridian_patch.phase.tracker import Phase


class RequestView(NamedTuple):
    """Read-only view of one running request."""

    phase: Phase
    # Accepted tokens since the phase began.
    tokens_in_phase: int
    # True when a boundary ended this request's thinking.
    is_handed_off: bool
    # True while its known tokens are being computed: a new prompt, or a resume after preemption.
    is_prefilling: bool
    # Tokens whose KV is computed, which a preemption loses.
    num_computed_tokens: int
    num_preemptions: int
    # Tokens among them that an offload tier keeps. What the prefix cache keeps is not known.
    num_offloaded_tokens: int = 0
    # As in vLLM, lower goes first.
    priority: int = 0


class OrderPolicy(Protocol):
    """Decides the order of the running requests."""

    @property
    def drift(self) -> Mapping[int, int]:
        """How ranks change while requests only decode.

        Maps the first number of a rank to what one more computed token adds to the last number.
        Ranks whose first number is missing do not change. This avoids ranking every request in
        every step.
        """

    def rank(self, view: RequestView) -> tuple[int, ...]:
        """Smaller is served sooner and preempted later; equal ranks keep the stock order.

        Called when a request changed, and from time to time for unchanged requests.
        """


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
        return standing, view.priority, view.num_offloaded_tokens - view.num_computed_tokens

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
