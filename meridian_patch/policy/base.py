"""What a policy sees of a request and what it decides."""

from typing import NamedTuple, Protocol

from meridian_patch.phase.router import Phase


class RequestView(NamedTuple):
    """Read-only view of one running request."""

    phase: Phase
    # Accepted tokens since the phase began.
    tokens_in_phase: int
    # True when a boundary ended this request's thinking.
    is_handed_off: bool
    # True while its known tokens are being computed: a new prompt, or a resume after preemption.
    is_prefilling: bool
    # Tokens whose KV is computed: what a preemption throws away.
    num_computed_tokens: int
    num_preemptions: int


class OrderPolicy(Protocol):
    """Decides the order of the running requests."""

    @property
    def name(self) -> str:
        """As in the configuration."""

    @property
    def is_noop(self) -> bool:
        """True when the stock order must be left alone in every step."""

    def rank(self, view: RequestView) -> tuple[int, int]:
        """Smaller is served sooner and preempted later; equal ranks keep the stock order."""
