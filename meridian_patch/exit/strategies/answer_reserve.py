"""Keeps tokens of ``max_tokens`` for the answer."""

import math
from typing import ClassVar, Self

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import ThoughtStart
from meridian_patch.exit.strategies.hard_cap import MOST_LEAD_SHARE, HardCap


class AnswerReserve(HardCap):
    """Closes when of ``max_tokens`` only the answer's ``answer_reserve`` is left."""

    reason = "answer_reserve"
    words = "closed, the rest of max_tokens is kept for the answer"
    settings: ClassVar[tuple[str, ...]] = ("answer_reserve",)

    @classmethod
    def is_on(cls, config: ExitConfig, start: ThoughtStart | None = None) -> bool:
        """See ``Strategy``: there is a reserve."""
        is_known = start is None or start.room_tokens is not None
        return config.answer_reserve is not None and is_known

    @classmethod
    def of(cls, config: ExitConfig, start: ThoughtStart) -> Self:
        """See ``Strategy``."""
        assert start.room_tokens is not None
        most = max(start.room_tokens, 0)
        lead = min(config.grace_tokens, most // MOST_LEAD_SHARE)
        return cls(most, lead, start.think_tokens)


def thought_room(reserve: float, max_tokens: int, close_tokens: int) -> int:
    """Output tokens behind which a close must begin, so that the answer has its reserve.

    Where a reserve leaves nothing to think, the answer has half of ``max_tokens`` instead.

    Args:
        reserve: tokens, or a share of ``max_tokens`` below 1.
        max_tokens: upper bound of a request's output, in tokens.
        close_tokens: what a close takes at most, with its wrap-up and with tokens in flight.
    """
    tokens = math.ceil(reserve * max_tokens) if reserve < 1 else int(reserve)
    room = max_tokens - tokens - close_tokens
    return room if room > 0 else max(max_tokens // 2 - close_tokens, 0)
