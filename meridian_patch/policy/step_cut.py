"""How many tokens a step may have while somebody reads an answer."""

from dataclasses import dataclass
from typing import Self

from meridian_patch.config.schema import PolicyConfig
from meridian_patch.policy.step_time import StepShape, StepTimeModel


@dataclass(frozen=True)
class CutSettings:
    """See the configuration fields of the same names.

    Attributes:
        full_tokens: the engine's own budget per step.
    """

    full_tokens: int
    step_cut_factor: float
    think_batch_multiplier: float
    min_prefill_tokens: int
    drain_s: float

    @classmethod
    def of(cls, config: PolicyConfig, full_tokens: int) -> Self:
        """From the configuration."""
        return cls(
            full_tokens,
            config.step_cut_factor,
            config.think_batch_multiplier,
            config.min_prefill_tokens,
            config.drain_s,
        )


class StepCut:
    """Cuts steps so that the tightest answer's inter-token latency is kept.

    1. Nobody answers: the engine's full budget.
    2. Somebody answers: decoding, and as much prefill as ends in time by ``model``; before the
       model has data, the full budget over ``think_batch_multiplier``.
    3. Where any prefill costs a fixed time, no less of it than is worth that time.
    4. Saturation guard: a cut that was used up in every step for ``drain_s`` holds work back
       that does not drain. It is doubled each ``drain_s`` from then on, until the backlog is gone.
    """

    def __init__(self, settings: CutSettings, model: StepTimeModel) -> None:
        self._settings = settings
        self._model = model
        # Since when every step has used its budget up.
        self._used_up_since_s: float | None = None

    def default_itl_s(self, shape: StepShape) -> float | None:
        """The inter-token latency to keep where nobody asks for one; None without data."""
        decode_s = self._model.decode_seconds(shape)
        return None if decode_s is None else self._settings.step_cut_factor * decode_s

    def token_budget(
        self, shape: StepShape, before: int, target_s: float | None, now_s: float
    ) -> int:
        """Tokens for the next step while somebody answers.

        Args:
            shape: decode rows and context of the running requests.
            before: tokens of the next prompt in line that are computed already.
            target_s: how long the step may take; None while that is not known.
            now_s: of a steady clock.
        """
        settings = self._settings
        cautious = int(settings.full_tokens / settings.think_batch_multiplier)
        room = None if target_s is None else self._model.prefill_room(shape, target_s, before)
        fitting = max(room.in_time, min(room.worthwhile, cautious)) if room else cautious
        prefill = max(fitting, settings.min_prefill_tokens) * self._widening(now_s)
        return int(min(shape.decode_rows + prefill, settings.full_tokens))

    def ran(self, *, is_used_up: bool, now_s: float) -> None:
        """A step was scheduled; ``is_used_up`` when a cut left nothing of its budget."""
        if not is_used_up:
            self._used_up_since_s = None
        elif self._used_up_since_s is None:
            self._used_up_since_s = now_s

    def _widening(self, now_s: float) -> float:
        if self._used_up_since_s is None:
            return 1.0
        drains = (now_s - self._used_up_since_s) / self._settings.drain_s
        return float(2 ** min(max(drains - 1, 0.0), 20))
