"""Upper bounds of a thought's length."""

from collections.abc import Sequence

from meridian_patch.exit.strategies.base import Firing, Reason, Signals, Strategy


class HardCap(Strategy):
    """Closes when a thought reaches a number of tokens.

    It fires ``lead_tokens`` before the bound, so that the close can wait for the end of a line and
    the bound still holds.

    Args:
        most_tokens: the bound.
        lead_tokens: how many tokens before the bound it fires.
        think_tokens: number of tokens that the thought has already.
        reason: ``hard_cap`` for ``max_think_tokens``, ``budget`` for vLLM's own budget.
    """

    def __init__(
        self,
        most_tokens: int,
        lead_tokens: int = 0,
        think_tokens: int = 0,
        reason: Reason = Reason.HARD_CAP,
    ) -> None:
        self.reason = reason
        self._fires_at = self.fires_from = most_tokens - lead_tokens
        self._why = f"{self._fires_at} think tokens of at most {most_tokens}"
        self._think_tokens = think_tokens

    def accept(self, token_ids: Sequence[int], signals: Signals, first: int) -> Firing | None:
        """See the class."""
        del signals
        index = max(first, self._fires_at - self._think_tokens - 1)
        self._think_tokens += len(token_ids)
        return Firing(index, self._why) if index < len(token_ids) else None
