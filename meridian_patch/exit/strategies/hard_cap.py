"""Upper bounds of a thought's length."""

from collections.abc import Sequence
from typing import ClassVar, Self

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.strategies.base import BUDGET, Firing, Signals, Strategy, ThoughtStart

# At most 1/8 of a bound may be given up to find the end of a line.
MOST_LEAD_SHARE = 8


class HardCap(Strategy):
    """Closes when the thoughts of a request reach ``max_think_tokens``.

    It fires ``lead_tokens`` before the bound, so that the close can wait for the end of a line and
    the bound still holds. A thought that opens after others has what they left of the bound.

    Args:
        most_tokens: the bound, in tokens of this thought.
        lead_tokens: how many tokens before the bound it fires.
        think_tokens: number of tokens that the thought has already.

    Attributes:
        most_tokens: the bound.
    """

    reason = "hard_cap"
    words = "closed at max_think_tokens"
    settings: ClassVar[tuple[str, ...]] = ("max_think_tokens",)
    is_bound = True

    def __init__(self, most_tokens: int, lead_tokens: int = 0, think_tokens: int = 0) -> None:
        self.most_tokens = most_tokens
        self._fires_at = self.fires_from = max(most_tokens - lead_tokens, 0)
        self._why = f"{self._fires_at} think tokens of at most {most_tokens}"
        self._think_tokens = think_tokens

    @classmethod
    def is_on(cls, config: ExitConfig, start: ThoughtStart | None = None) -> bool:
        """See ``Strategy``: there is a bound."""
        del start
        return config.max_think_tokens is not None

    @classmethod
    def of(cls, config: ExitConfig, start: ThoughtStart) -> Self:
        """See ``Strategy``."""
        assert config.max_think_tokens is not None
        lead = min(config.grace_tokens, config.max_think_tokens // MOST_LEAD_SHARE)
        left = max(config.max_think_tokens - start.earlier_tokens, 0)
        return cls(left, lead, start.think_tokens)

    def accept(self, token_ids: Sequence[int], signals: Signals, first: int) -> Firing | None:
        """See the class."""
        del signals
        index = max(first, self._fires_at - self._think_tokens - 1)
        self._think_tokens += len(token_ids)
        return Firing(index, self._why) if index < len(token_ids) else None


class Budget(HardCap):
    """Closes when a thought reaches the request's ``thinking_token_budget``; vLLM does so."""

    reason = BUDGET
    words = "closed by vLLM at thinking_token_budget"
    settings = ()

    @classmethod
    def is_on(cls, config: ExitConfig, start: ThoughtStart | None = None) -> bool:
        """See ``Strategy``: the request has a budget."""
        del config
        return start is not None and start.budget_tokens is not None

    @classmethod
    def of(cls, config: ExitConfig, start: ThoughtStart) -> Self:
        """See ``Strategy``. vLLM ends the thought there: there is no time to wait for a line."""
        del config
        assert start.budget_tokens is not None
        return cls(start.budget_tokens, 0, start.think_tokens)
