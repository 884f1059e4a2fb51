"""Who makes room for a newcomer: time-sharing by attained service."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from meridian_patch.config.schema import PolicyConfig
from meridian_patch.policy.step_time import StepTimeModel

# Credit that can be saved up, in seconds of engine time.
_MOST_CREDIT_S = 2.0


class Thinker(NamedTuple):
    """A running request that thinks."""

    request_id: str
    # Tokens that a displacement makes it compute again. What an offload tier keeps costs nothing:
    # a load is much cheaper, and runs beside the steps.
    held_tokens: int
    # Think tokens so far: the service it had.
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
    """Displaces the thinker with the most attained service when a newcomer finds no room.

    A displaced request computes its tokens again. What that costs is paid from a credit of
    ``sharing_overhead`` seconds per second, so that throughput loses no more than this share.
    """

    def __init__(self, settings: SharingSettings, model: StepTimeModel) -> None:
        self._settings = settings
        self._model = model
        self._credit_s = 0.0
        self._seen_s: float | None = None

    def advance(self, now_s: float) -> None:
        """The clock went on."""
        if self._seen_s is not None:
            earned = (now_s - self._seen_s) * self._settings.sharing_overhead
            self._credit_s = min(self._credit_s + earned, _MOST_CREDIT_S)
        self._seen_s = now_s

    def choose(self, thinkers: Iterable[Thinker]) -> Thinker | None:
        """Whom to displace; None when nobody thought for long, or it would cost too much."""
        settings = self._settings
        affordable = self._model.tokens_within(max(self._credit_s, 0.0)) or 0
        longest = max(
            (
                thinker
                for thinker in thinkers
                if thinker.attained_tokens >= settings.sharing_min_tokens
                and thinker.num_preemptions < settings.max_preemptions
                and thinker.held_tokens <= affordable
            ),
            key=lambda thinker: thinker.attained_tokens,
            default=None,
        )
        if longest is not None:
            self._credit_s -= self._model.prefill_seconds(longest.held_tokens) or 0.0
        return longest
