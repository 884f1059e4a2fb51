"""Computes the token budget of a step while any request answers."""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from meridian_patch.config.policy import PolicyConfig
from meridian_patch.policy.step_time import PrefillAllowance, StepShape, StepTimeModel

# The saturation guard lengthens a step up to this multiple of its time without prefill. Prefill has
# half of the machine's time then. Longer steps would increase the latency of every answer, and
# hardly drain the backlog faster where prefill overlaps with reading KV.
_MOST_STRETCH = 2.0
# From the beginning of a step above the captured graph to that of the next one, where such steps
# are worth it, in times of its duration: prompts that arrive meanwhile are computed together.
_LAUNCH_GAP = 1.5
# A launched step that took more than so many times a decode stalled, and says nothing of others.
_MOST_TIMES_DECODE = 12.0
# The default target is at least this multiple of the decode time, and otherwise at most 6 times a
# step's bare time: prefill then has 5/6 of the machine's time, and longer steps hardly compute
# prompts faster.
_LEAST_FACTOR = 1.05
_ENOUGH_STRETCH = 6.0
# After so many times `drain_s` of used-up steps a chunk of twice the smallest size is tried.
_DRAINS_AT_LEAST = 2.0
# A prompt takes at most about so many times the time that it would take with the full budget; less
# than 3, because the step times are predicted.
_MOST_SLOWDOWN = 2.8

UNNOTICED_S: Final = 0.04
"""A gap between two tokens that few readers notice, in seconds.

MLPerf Inference 5.0 asks for it of Llama 2 70B in interactive use
(https://mlcommons.org/2025/04/llm-inference-v5).
"""


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


class PromptRest(NamedTuple):
    """A prompt in progress.

    Attributes:
        tokens: its length.
        computed: how many of them are computed.
        begun: how many were computed when its time began.
        spent_s: seconds since then.
    """

    tokens: int
    computed: int
    begun: int
    spent_s: float


class PrefillBudget:
    """Lowers the token budget of steps so that the tightest inter-token latency is kept.

    1. Without an answer, a step has the engine's full budget (the caller does not ask).
    2. With an answer, a step decodes, and has as much prefill as ends in time according to
       ``model``. Before the model has data: twice the prefill that has not made a step longer, and
       at most the full budget divided by ``think_batch_multiplier``.
       If fewer tokens than ``min_prefill_tokens`` end in time and no latency is set, the step has
       as many as end in ``UNNOTICED_S``, and rule 3 does not apply.
    3. If any prefill adds a fixed time to a step, the budget has room for enough prefill that a
       token takes little more than in the best of the sizes that were seen. Where no chunk of use
       is in time and those that were seen take longer than decoding, the prompt in progress has
       larger ones, if it has as many tokens left.
    4. If every step has prefill, a step from time to time has none, to measure decoding alone.
    5. Saturation guard: if the lowered budget was used up in every step for ``drain_s`` seconds,
       the backlog does not drain. From then on steps may take twice as long with each ``drain_s``,
       until a step leaves budget unused or prefill has half of the step.
    6. If only ``min_prefill_tokens`` fit even so, one chunk in ``drain_s`` seconds is twice as
       large: chunks of one size do not tell what a token takes and what is fixed.
    7. A step that a captured graph cannot run takes longer by a fixed time. So a step that is cut
       stays within the graph, or is well above it: where rule 3 asks for it, where no piece of a
       prompt fits otherwise, and now and then while the backlog does not drain or the graph has no
       room for ``min_prefill_tokens``. Between two that rule 3 asks for, steps only decode for a
       while, so that prompts that arrive meanwhile share one; not while a prompt needs more than
       the graph has room for.
    8. A prompt has room for enough tokens to end in ``_MOST_SLOWDOWN`` times the time that it would
       take with the full budget (``owed_tokens``).
    """

    def __init__(self, settings: PrefillBudgetSettings, model: StepTimeModel) -> None:
        self._settings = settings
        self._model = model
        # Time since which every step has used up its budget.
        self._used_up_since_s: float | None = None
        self._larger_tried_s = float("-inf")
        # When a step without a captured graph may be planned again.
        self._next_launch_s = float("-inf")
        # Of the planned step: prefill tokens above which it is launched, and the pause after it.
        self._pause: tuple[int, float] | None = None

    def default_itl_s(self, shape: StepShape) -> float | None:
        """The inter-token latency to keep if none is requested; None without data.

        Args:
            shape: decode tokens, and the context of the decoding requests only.
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
        owed: int = 0,
        rest: int = 0,
        patient_s: float = 0.0,
    ) -> int:
        """Return the token budget of the next step, decode and prefill, while a request answers.

        Prefill gets what the model predicts to end within ``target_s``, or more where its fixed
        cost makes a small chunk wasteful. A step from which the decode time is to be learnt gets
        none. The budget never exceeds that of the engine, even if ``least`` does.

        Args:
            shape: decode tokens and context of the requests that decode.
            before: tokens of the next prompt in line that are computed already.
            target_s: seconds that the step may take; None while that is not known.
            now_s: monotonic seconds; after ``drain_s`` of used-up steps the target is widened.
            least: tokens of prefill below which no prompt could be scheduled.
            owed: tokens of prefill that each step has on average (``owed_tokens``).
            rest: tokens left of the prompt in progress; 0: there is none.
            patient_s: seconds that the step may take instead where too little prefill ends in time.
        """
        settings = self._settings
        if self._model.wants_decode_only(shape):
            return shape.decode_tokens
        most = int(settings.full_tokens / settings.think_batch_multiplier)
        room, worthwhile = None, 0
        enough = max(least, settings.min_prefill_tokens)
        if target_s is not None:
            room = self._room(shape, target_s, before, patient_s, now_s)
        if room is None:
            in_time, fitting = 0, min(self._model.untested_tokens, most)
        else:
            in_time = room.in_time
            # In whole pieces: a rest that is smaller than one cannot be used.
            worthwhile = min(math.ceil(room.worthwhile / least) * least, most)
            if in_time < enough:
                untried = self._model.untried_chunk(shape, most)
                worthwhile = max(worthwhile, untried if untried <= rest else 0)
            fitting = max(in_time, worthwhile)
        prefill = max(fitting, enough, owed)
        if prefill == settings.min_prefill_tokens and self._may_try_larger(now_s):
            prefill *= 2
        graph_room = self._model.graph_room(shape)
        if graph_room is not None and in_time <= graph_room <= prefill:
            # Only where no chunk of use in the graph is in time either.
            pays_above = in_time < enough and worthwhile > graph_room
            # In a smaller room a prompt would crawl.
            is_tight = graph_room < min(settings.min_prefill_tokens, owed)
            is_pressing = is_tight or self._drains(now_s) > _DRAINS_AT_LEAST
            fits = graph_room >= max(least, 1)
            is_early = now_s < self._next_launch_s
            can_pause = shape.decode_tokens > 0 and least <= max(graph_room, 1)
            if pays_above and is_early and can_pause:
                return shape.decode_tokens
            if fits and not pays_above and (is_early or not is_pressing):
                prefill = graph_room
            else:
                if not pays_above:
                    # A little above the graph a step takes as long as with many more tokens.
                    many = self._model.launched_chunk(before) or 0
                    prefill = max(prefill, min(many, settings.full_tokens))
                gap = _LAUNCH_GAP if pays_above else _MOST_STRETCH
                self._pause = graph_room, gap * self._launched_s(shape, prefill, before)
        return min(shape.decode_tokens + prefill, settings.full_tokens)

    def probe_budget(self, shape: StepShape, budget: int) -> int:
        """The most tokens to which a lowered budget may be raised for a probe of large blocks.

        Not in a step that only decodes, and not beyond the captured graph.
        """
        room = self._model.graph_room(shape)
        if budget <= shape.decode_tokens:
            return budget
        is_launched = room is None or budget > shape.decode_tokens + room
        return self._settings.full_tokens if is_launched else shape.decode_tokens + (room or 0)

    def _room(
        self, shape: StepShape, target_s: float, before: int, patient_s: float, now_s: float
    ) -> PrefillAllowance | None:
        """Prefill that ends in time, or in ``patient_s`` if chunks of use do only then."""
        room = self._model.prefill_room(shape, target_s, before)
        if room is None:
            return None
        accepted_s, least = target_s, self._settings.min_prefill_tokens
        if room.in_time < least and patient_s > target_s:
            longer = self._model.prefill_room(shape, patient_s, before)
            if longer is not None and longer.in_time >= least:
                room, accepted_s = longer, patient_s
        widened_s = self._widened_s(accepted_s, shape, now_s)
        if widened_s > accepted_s:
            room = self._model.prefill_room(shape, widened_s, before) or room
        if accepted_s == target_s:
            return room
        # Not in larger chunks than what ends in it, nor much larger ones than were timed.
        return PrefillAllowance(min(room.in_time, 2 * self._model.largest_chunk), 0)

    def _launched_s(self, shape: StepShape, prefill: int, before: int) -> float:
        """Seconds of a step above the captured graph, a stall left out."""
        attended = prefill * before + prefill * (prefill + 1) // 2
        whole = shape._replace(prefill_tokens=prefill, attended_tokens=attended)
        seconds = self._model.seconds(whole) or 0.0
        return min(seconds, _MOST_TIMES_DECODE * (self._model.decode_seconds(shape) or 0.0))

    def owed_tokens(self, shape: StepShape, prompt: PromptRest, cadence: int) -> int:
        """Prefill tokens of a step with which a prompt in progress ends in bounded time.

        Args:
            shape: decode tokens and context of the requests that decode.
            prompt: the prompt.
            cadence: of so many steps one may compute prompts.

        Returns:
            0 while step times are not known, or decoding is thought to take none; at most what
            takes as long as the decodes since the last step that could compute prompts.
        """
        decode_s = self._model.decode_seconds(shape)
        whole_s, begun_s, computed_s = (
            self._model.prefill_seconds(tokens)
            for tokens in (prompt.tokens, prompt.begun, prompt.computed)
        )
        if not decode_s or whole_s is None or begun_s is None or computed_s is None:
            return 0
        full = self._settings.full_tokens
        left = prompt.tokens - prompt.computed
        # Between two chunks are the decodes of the steps that may not compute prompts, too.
        between_s = cadence * decode_s
        more = math.ceil((prompt.tokens - prompt.begun) / full) - 1
        alone_s = whole_s - begun_s + decode_s + more * between_s
        rest_s = _MOST_SLOWDOWN * alone_s - prompt.spent_s - (whole_s - computed_s) - decode_s
        owed = math.ceil(left / (1 + max(rest_s, 0.0) // between_s))
        # The answers' latency goes before the prompt's: prefill has half of the time at most.
        bare_s = self._model.bare_seconds(shape) or decode_s
        room = self._model.prefill_room(
            shape, bare_s + between_s, prompt.computed, is_on_average=True
        )
        return min(owed, room.in_time, full) if room else 0

    def ran(self, prefill_tokens: int, *, is_used_up: bool, now_s: float) -> None:
        """Note a scheduled step; ``is_used_up``: a lowered budget was used up."""
        pause, self._pause = self._pause, None
        if pause is not None and prefill_tokens > pause[0]:
            self._next_launch_s = now_s + pause[1]
        if not is_used_up:
            self._used_up_since_s = None
        elif self._used_up_since_s is None:
            self._used_up_since_s = now_s

    def _may_try_larger(self, now_s: float) -> bool:
        drain_s = self._settings.drain_s
        if self._drains(now_s) < _DRAINS_AT_LEAST or now_s - self._larger_tried_s < drain_s:
            return False
        self._larger_tried_s = now_s
        return True

    def _drains(self, now_s: float) -> float:
        """For how many times ``drain_s`` every step has used up its budget."""
        if self._used_up_since_s is None:
            return 0.0
        return (now_s - self._used_up_since_s) / self._settings.drain_s

    def _widened_s(self, target_s: float, shape: StepShape, now_s: float) -> float:
        drains = self._drains(now_s)
        if drains <= 1:
            return target_s
        bare_s = self._model.bare_seconds(shape) or 0.0
        widened_s = target_s * 2 ** min(drains - 1, 20)
        return max(target_s, min(widened_s, _MOST_STRETCH * bare_s))
