"""The interface of order policies: their view of a request, and the rank that they return."""

from collections.abc import Mapping
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
    num_kept_tokens: int = 0
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
