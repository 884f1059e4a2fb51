"""What a policy sees of a request and what it decides."""

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
    # Tokens whose KV is computed: what a preemption throws away,
    num_computed_tokens: int
    num_preemptions: int
    # but for these, which an offload tier gives back. What the prefix cache would is not known.
    num_kept_tokens: int = 0
    # As vLLM's own: lower goes first.
    priority: int = 0


class OrderPolicy(Protocol):
    """Decides the order of the running requests."""

    @property
    def drift(self) -> Mapping[int, int]:
        """How ranks change while nothing happens but decoding.

        By the first number of a rank: what one more computed token adds to the last number.
        Standings that are not named here do not change. The order is kept by this instead of
        ranking everybody in every step.
        """

    def rank(self, view: RequestView) -> tuple[int, ...]:
        """Smaller is served sooner and preempted later; equal ranks keep the stock order.

        Called when something happened to a request, and now and then when nothing did.
        """
