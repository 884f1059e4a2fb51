"""Chooses the thinkers to preempt for a new request: time-sharing by attained service."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple, Self

from meridian_patch.config.policy import PolicyConfig
from meridian_patch.policy.step_time import StepTimeModel

# Upper bound of the credit, in seconds of engine time.
_MOST_CREDIT_S = 2.0
# Upper bounds of thinkers whose blocks are counted, and of thinkers preempted together.
_MOST_TRIED = 8
_MOST_TOGETHER = 4


class Thinker(NamedTuple):
    """A running request that thinks."""

    request_id: str
    # Tokens that it must compute again after a preemption. Tokens kept by an offload tier do not
    # count: loading them takes little time and overlaps with steps.
    held_tokens: int
    # Think tokens so far, which are its attained service.
    attained_tokens: int
    num_preemptions: int


@dataclass(frozen=True)
class SharingSettings:
    """See the configuration fields of the same names."""

    sharing_min_tokens: int
    sharing_overhead: float
    max_preemptions: int

    @classmethod
    def of(cls, config: PolicyConfig) -> Self:
        """From the configuration."""
        return cls(config.sharing_min_tokens, config.sharing_overhead, config.max_preemptions)


class TimeSharing:
    """Chooses the thinkers with the most attained service if a new request does not fit.

    A preempted request computes its tokens again. The time for that is taken from a credit that
    grows by ``sharing_overhead`` seconds per second, which bounds the loss of throughput.
    """

    def __init__(self, settings: SharingSettings, model: StepTimeModel) -> None:
        self._settings = settings
        self._model = model
        self._credit_s = 0.0
        self._seen_s: float | None = None

    def advance(self, now_s: float) -> None:
        """Add the credit earned since the last call."""
        if self._seen_s is not None:
            earned = (now_s - self._seen_s) * self._settings.sharing_overhead
            self._credit_s = min(self._credit_s + earned, _MOST_CREDIT_S)
        self._seen_s = now_s

    def choose(
        self, thinkers: Iterable[Thinker], missing_blocks: int, freed: Callable[[Thinker], int]
    ) -> list[Thinker]:
        """The thinkers to preempt for a new request; empty if they would not free enough blocks.

        This is the thinker with the most attained service whose blocks suffice. If no single one
        suffices, it is several, by most attained service. The credit must cover what they compute
        again.

        Args:
            thinkers: running thinkers that may be preempted.
            missing_blocks: KV blocks that the new request lacks.
            freed: returns the KV blocks that a preemption of a thinker would free.
        """
        settings = self._settings
        affordable = self._model.tokens_within(max(self._credit_s, 0.0)) or 0
        longest = nlargest(
            _MOST_TRIED,
            (
                thinker
                for thinker in thinkers
                if thinker.attained_tokens >= settings.sharing_min_tokens
                and thinker.num_preemptions < settings.max_preemptions
                and thinker.held_tokens <= affordable
            ),
            key=lambda thinker: thinker.attained_tokens,
        )
        blocks = [freed(thinker) for thinker in longest]
        for thinker, count in zip(longest, blocks, strict=True):
            if count >= missing_blocks:
                return self._pay([thinker])
        for together in range(2, min(_MOST_TOGETHER, len(longest)) + 1):
            if sum(blocks[:together]) >= missing_blocks:
                return self._pay(longest[:together])
        return []

    def _pay(self, chosen: list[Thinker]) -> list[Thinker]:
        """Take the price from the credit; returns an empty list if it does not suffice."""
        price_s = self._price_s(chosen)
        if len(chosen) > 1 and price_s > self._credit_s:
            return []
        self._credit_s -= price_s
        return chosen

    def refund(self, chosen: list[Thinker]) -> None:
        """Return the price of thinkers that were chosen but not preempted."""
        self._credit_s += self._price_s(chosen)

    def _price_s(self, chosen: list[Thinker]) -> float:
        return sum(self._model.prefill_seconds(each.held_tokens) or 0.0 for each in chosen)
