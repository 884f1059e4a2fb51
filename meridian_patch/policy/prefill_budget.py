"""How many tokens a step may have while somebody reads an answer."""

from dataclasses import dataclass
from typing import Self

from meridian_patch.config.schema import PolicyConfig
from meridian_patch.policy.step_time import StepShape, StepTimeModel

# The saturation guard lengthens a step up to this many times what it takes beside its prefill.
# Prefill has half of the machine then; what more would drain faster is bought with every answer's
# latency, and where prefill runs beside the reading of KV it would drain hardly faster at all.
_MOST_STRETCH = 2.0
# The least a step is lengthened by default, and how many times a step's bare time is long enough:
# where prefill has five sixths of the machine already, longer steps hardly compute prompts faster.
_LEAST_FACTOR = 1.05
_ENOUGH_STRETCH = 6.0


@dataclass(frozen=True)
class PrefillBudgetSettings:
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


class PrefillBudget:
    """Cuts steps so that the tightest answer's inter-token latency is kept.

    1. Nobody answers: the engine's full budget.
    2. Somebody answers: decoding, and as much prefill as ends in time by ``model``. Before the
       model has data: twice the prefill that did not make a step longer so far, and at most the
       full budget over ``think_batch_multiplier``.
    3. Where any prefill costs a fixed time: no less of it than is worth that time.
    4. Now and then, where every step has prefill: none of it, to see what decoding alone takes.
    5. Saturation guard: a cut that was used up in every step for ``drain_s`` holds work back
       that does not drain. Steps may take twice as long each ``drain_s`` from then on, until the
       backlog is gone or prefill has half of the step.
    """

    def __init__(self, settings: PrefillBudgetSettings, model: StepTimeModel) -> None:
        self._settings = settings
        self._model = model
        # Since when every step has used its budget up.
        self._used_up_since_s: float | None = None

    def default_itl_s(self, shape: StepShape) -> float | None:
        """The inter-token latency to keep where nobody asks for one; None without data.

        Args:
            shape: decode tokens, and the context of requests that decode alone.
        """
        decode_s, bare_s = self._model.decode_seconds(shape), self._model.bare_seconds(shape)
        if decode_s is None:
            return None
        most_s = self._settings.step_cut_factor * decode_s
        if bare_s is None:
            return most_s
        return min(most_s, max(_LEAST_FACTOR * decode_s, _ENOUGH_STRETCH * bare_s))

    def token_budget(
        self,
        shape: StepShape,
        before: int,
        target_s: float | None,
        now_s: float,
        least: int = 1,
    ) -> int:
        """Tokens for the next step while somebody answers.

        Args:
            shape: decode tokens and context of the requests that decode.
            before: tokens of the next prompt in line that are computed already.
            target_s: how long the step may take; None while that is not known.
            now_s: of a steady clock.
            least: tokens of prefill below which no prompt could be scheduled.
        """
        settings = self._settings
        if self._model.wants_decode_only(shape):
            return shape.decode_tokens
        most = int(settings.full_tokens / settings.think_batch_multiplier)
        room = None
        if target_s is not None:
            target_s = self._widened_s(target_s, shape, now_s)
            room = self._model.prefill_room(shape, target_s, before)
        if room is None:
            fitting = min(self._model.untested_tokens, most)
        else:
            fitting = max(room.in_time, min(room.worthwhile, most))
        prefill = max(fitting, settings.min_prefill_tokens, least)
        return min(shape.decode_tokens + prefill, settings.full_tokens)

    def ran(self, *, is_used_up: bool, now_s: float) -> None:
        """A step was scheduled; ``is_used_up`` when a cut left nothing of its budget."""
        if not is_used_up:
            self._used_up_since_s = None
        elif self._used_up_since_s is None:
            self._used_up_since_s = now_s

    def _widened_s(self, target_s: float, shape: StepShape, now_s: float) -> float:
        if self._used_up_since_s is None:
            return target_s
        bare_s = self._model.bare_seconds(shape) or 0.0
        drains = (now_s - self._used_up_since_s) / self._settings.drain_s
        widened_s = target_s * 2 ** min(max(drains - 1, 0.0), 20)
        return max(target_s, min(widened_s, _MOST_STRETCH * bare_s))
