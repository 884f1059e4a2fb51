"""What a strategy for ending thinking sees and says."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Self

# Signals of one accepted token, as the device writes them; see ``Signals`` for the columns.
Row = Sequence[float]
# Of a token that was not measured.
NO_SIGNALS: Final[Row] = (float("nan"),) * 4


class Signals(NamedTuple):
    """Signals of several accepted tokens, one element per token.

    Each is of softmax(raw logits) of the row that the token was sampled from, before temperature
    and penalties. NaN where it was not measured.

    Attributes:
        entropy: in nats.
        lse: log-sum-exp of the logits, in nats.
        max_prob: greatest probability.
        end_prob: probability of the end boundary's first token.
    """

    entropy: Sequence[float]
    lse: Sequence[float]
    max_prob: Sequence[float]
    end_prob: Sequence[float]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """Columns of one row or more."""
        return cls(*zip(*rows, strict=True))


class Reason(StrEnum):
    """Why a thought ended, or would have."""

    NATURAL = "natural"
    EAT = "eat"
    RPDI = "rpdi"
    HARD_CAP = "hard_cap"
    BUDGET = "budget"
    END_PROBABILITY = "end_probability"


BOUNDS: Final = frozenset({Reason.HARD_CAP, Reason.BUDGET})
"""Reasons that are bounds of a thought's length, and judge nothing."""

BY_SIGNALS: Final = (Reason.EAT, Reason.RPDI, Reason.END_PROBABILITY)
"""Strategies that need signals or probes: callers are told where an engine has none."""


def own_end(think_tokens: int, budget_tokens: int | None) -> Reason:
    """What ended a thought that nobody here closed.

    ``budget`` when it is longer than vLLM's budget: vLLM does not say when it closes one.
    """
    is_over = budget_tokens is not None and think_tokens > budget_tokens
    return Reason.BUDGET if is_over else Reason.NATURAL


class Firing(NamedTuple):
    """A strategy would close a thought.

    Attributes:
        at: index of the token, among those that were just taken in, behind which it would.
        why: the figures behind it, for people.
    """

    at: int
    why: str


class Strategy:
    """Says when one thought should be closed; a new thought gets a new strategy.

    A strategy overrides the method for what it measures. Both take in all they are given, in
    order; a signal that is no finite number is left out and never fires.
    """

    reason: Reason
    # Think tokens of a thought before which ``accept`` never fires: until then tokens may be kept.
    fires_from: float = 0

    def accept(self, token_ids: Sequence[int], signals: Signals, first: int) -> Firing | None:
        """Take in the thought's next tokens.

        Args:
            token_ids: accepted tokens, however many steps they came in.
            signals: of these tokens.
            first: index of the first token at which the strategy may fire.

        Returns:
            The first firing at or after ``first``.
        """
        del token_ids, signals, first
        return None

    def probed(self, entropy_nats: float) -> str | None:
        """Take in the entropy behind a trial boundary; why the thought should be closed now."""
        del entropy_nats
        return None
