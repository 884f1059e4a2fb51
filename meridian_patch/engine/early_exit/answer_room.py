"""Where thoughts must be closed so that requests keep room for their answers."""

from collections.abc import Callable
from typing import Any

from meridian_patch.config.schema import ExitConfig
from meridian_patch.engine.early_exit.engine_lag import lag_of
from meridian_patch.exit.strategies.answer_reserve import thought_room
from meridian_patch.phase.boundaries import TokenIds


class AnswerRoom:
    """Computes how many tokens a request may have before its thought must be closed.

    Args:
        scheduler: the phase-aware scheduler.
        sequence: tokens that a close without a wrap-up forces.
        ids_of: tokens of a wrap-up's text.
    """

    def __init__(
        self, scheduler: Any, sequence: TokenIds, ids_of: Callable[[str], TokenIds]
    ) -> None:
        self._ids_of = ids_of
        self._max_model_len = scheduler.max_model_len
        per_step = 1 + scheduler.num_spec_tokens
        # A step may take a thought past the bound by its drafts, and the steps in flight are not
        # called back.
        in_flight = lag_of(scheduler, 1).tokens_at_close(0) * per_step
        self._close_tokens = len(sequence) + in_flight + scheduler.num_spec_tokens

    def closes_by(self, request: Any, config: ExitConfig) -> int | None:
        """Known tokens, prompt included, behind which a close must begin; None: no reserve."""
        if config.answer_reserve is None:
            return None
        given = request.num_prompt_tokens
        # Load-bearing: upstream ends a request at the first of these.
        most = min(request.max_tokens, self._max_model_len - given)
        wrap_up = self._ids_of(config.wrap_up) if config.wrap_up else ()
        room = thought_room(config.answer_reserve, most, self._close_tokens + len(wrap_up))
        return int(given + room)
