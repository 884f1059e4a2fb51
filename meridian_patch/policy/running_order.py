"""Ranks running requests with answers first."""

from enum import IntEnum
from typing import NamedTuple

from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.levels import Levels


class RequestView(NamedTuple):
    """Read-only view of one running request."""

    phase: Phase
    # Accepted tokens since the phase began.
    tokens_in_phase: int
    # True when a boundary ended this request's thinking.
    is_handed_off: bool
    # True while its known tokens are being computed: a new prompt, or a resume after preemption.
    is_prefilling: bool
    # Think tokens so far, and tokens of the prompt, which decide its level.
    think_tokens: int
    prompt_tokens: int
    # As in vLLM, lower goes first.
    priority: int = 0


class Standing(IntEnum):
    """Classes of requests in order of service; preemption starts with the last."""

    HANDOFF = 0
    ANSWER = 1
    ANSWER_PREFILLING = 2
    THINK = 3
    PREFILL = 4


class LatencyPolicy:
    """Orders running requests by phase, answers first.

    1. First, requests in their hand-off, that is between the boundary and their first
       ``protected_answer_tokens`` answer tokens.
    2. Then answers; among them, those that recompute tokens after a preemption come last.
    3. Then thinkers by level, the lowest first: the longest thinker is preempted first.
    4. Prefill comes last, the lowest level first: new prompts, and thinkers that recompute.
    5. Within each class, the requests' own priorities decide first. Equal ranks keep stock order.

    Invariant: an answer is preempted only if no thinker and no prefill is left.

    Args:
        protected_answer_tokens: length of the hand-off, in answer tokens.
        levels: the levels of requests.
    """

    def __init__(self, protected_answer_tokens: int, levels: Levels) -> None:
        self._protected_answer_tokens = protected_answer_tokens
        self._levels = levels

    def rank(self, view: RequestView) -> tuple[int, int, int]:
        """The request's class, its priority, and its level.

        Smaller is served sooner and preempted later; equal ranks keep the stock order. Called when
        a request changed, and from time to time for unchanged requests.
        """
        standing = self._standing(view)
        if standing < Standing.THINK:
            return standing, view.priority, 0
        prompt_tokens = view.prompt_tokens if standing is Standing.PREFILL else 0
        return standing, view.priority, self._levels.of(view.think_tokens, prompt_tokens)

    def _standing(self, view: RequestView) -> Standing:
        if view.phase is Phase.ANSWER:
            if view.is_prefilling:
                return Standing.ANSWER_PREFILLING
            if view.is_handed_off and view.tokens_in_phase < self._protected_answer_tokens:
                return Standing.HANDOFF
            return Standing.ANSWER
        if view.phase is Phase.PREFILL or view.is_prefilling:
            return Standing.PREFILL
        return Standing.THINK
