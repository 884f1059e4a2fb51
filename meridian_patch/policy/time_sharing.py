"""Chooses the thinkers to preempt for a request of a lower level: time-sharing by attained service.

The levels are those of multi-level feedback queues (Corbató et al., 1962), as FastServe uses them
for generated tokens (Wu et al., 2023).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Self

from meridian_patch.config.policy import PolicyConfig
from meridian_patch.policy.step_time import StepShape, StepTimeModel

# Upper bound of the credit, in seconds of engine time.
_MOST_CREDIT_S = 2.0
# Least share of `sharing_overhead` that is earned, however dear a recompute is.
_LEAST_SHARE = 0.1
# A thinker makes no room before it has thought for this share of the time that computing it again
# takes.
_LEAST_SERVICE = 0.1
# Upper bound of thinkers that are looked at for one request.
_MOST_TRIED = 32


class Thinker(NamedTuple):
    """A running request that thinks."""

    request_id: str
    # Tokens that it must compute again after a preemption. Tokens kept by an offload tier do not
    # count: loading them takes little time and overlaps with steps.
    held_tokens: int
    # Think tokens since it was admitted or resumed last.
    thought_tokens: int


@dataclass(frozen=True)
class SharingSettings:
    """See the configuration field of the same name."""

    sharing_overhead: float

    @classmethod
    def of(cls, config: PolicyConfig) -> Self:
        """From the configuration."""
        return cls(config.sharing_overhead)


class TimeSharing:
    """Chooses the thinkers with the most attained service if a request in line does not fit.

    A preempted request computes its tokens again. The time for that is taken from a credit that
    grows by at most ``sharing_overhead`` seconds per second, and slower the dearer a recomputed
    token is against a decoded one: where both cost the same, nearly nothing is gained by sharing.
    """

    def __init__(self, settings: SharingSettings, model: StepTimeModel) -> None:
        self._settings = settings
        self._model = model
        self._credit_s = 0.0
        self._price = 1.0
        self._seen_s: float | None = None

    def advance(self, now_s: float) -> None:
        """Add the credit earned since the last call."""
        if self._seen_s is not None:
            share = max(_LEAST_SHARE, 1 - self._price) * self._settings.sharing_overhead
            earned = (now_s - self._seen_s) * share
            self._credit_s = min(self._credit_s + earned, _MOST_CREDIT_S)
        self._seen_s = now_s

    def choose(
        self,
        thinkers: Iterable[Thinker],
        missing_blocks: int,
        freed: Callable[[Thinker], int],
        shape: StepShape,
        *,
        is_owed: bool = False,
    ) -> list[Thinker]:
        """The thinkers to preempt for a request; empty if they would not free enough blocks.

        These are the first ones that suffice together, less those among them that the others do
        without. The credit must cover what they compute again.

        Args:
            thinkers: running thinkers that may be preempted, in the order in which they make room.
            missing_blocks: KV blocks that the request lacks; 0 or less if it lacks a seat only.
            freed: returns the KV blocks that a preemption of a thinker would free.
            shape: decode tokens and context of the next step.
            is_owed: the request is made room for at any price, as one that answers or has aged.
        """
        price = self._model.recompute_price(shape)
        self._price = self._price if price is None else price
        if self._credit_s <= 0 and not is_owed:
            return []
        tried: list[tuple[Thinker, int]] = []
        surplus = -missing_blocks
        for thinker in islice(thinkers, _MOST_TRIED):
            if not is_owed and not self._is_paid_off(thinker):
                continue
            blocks = freed(thinker)
            tried.append((thinker, blocks))
            surplus += blocks
            if surplus >= 0:
                break
        else:
            return []
        chosen = []
        for thinker, blocks in tried[:-1]:
            if surplus >= blocks:
                surplus -= blocks
            else:
                chosen.append(thinker)
        return self._pay([*chosen, tried[-1][0]])

    def _is_paid_off(self, thinker: Thinker) -> bool:
        """Whether a thinker has thought long enough for what it cost to compute it."""
        return thinker.thought_tokens >= _LEAST_SERVICE * self._price * thinker.held_tokens

    def _pay(self, chosen: list[Thinker]) -> list[Thinker]:
        self._credit_s -= self._price_s(chosen)
        return chosen

    def refund(self, chosen: list[Thinker]) -> None:
        """Return the price of thinkers that were chosen but not preempted."""
        self._credit_s += self._price_s(chosen)

    def _price_s(self, chosen: list[Thinker]) -> float:
        return sum(self._model.prefill_seconds(each.held_tokens) or 0.0 for each in chosen)
