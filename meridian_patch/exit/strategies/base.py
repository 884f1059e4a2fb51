"""The interface of strategies: their inputs, results and reasons."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Self

# Signals of one accepted token, as the device writes them; see ``Signals`` for the columns.
TokenSignals = Sequence[float]
# The row of a token that was not measured.
NO_SIGNALS: Final[TokenSignals] = (float("nan"),) * 4


class Signals(NamedTuple):
    """Signals of several accepted tokens, one element per token.

    Each is computed from softmax(raw logits) of the row that the token was sampled from, before
    temperature and penalties. NaN for a token that was not measured.

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
    def of(cls, rows: Sequence[TokenSignals]) -> Self:
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
    LOOP = "loop"
    PATTERN = "pattern"


BOUNDS: Final = frozenset({Reason.HARD_CAP, Reason.BUDGET})
"""Reasons that only bound a thought's length, and use no signals."""

BY_SIGNALS: Final = (Reason.EAT, Reason.RPDI, Reason.END_PROBABILITY)
"""Strategies that need signals or probes: callers are told where an engine has none."""


def own_end(think_tokens: int, budget_tokens: int | None) -> Reason:
    """The reason of an end that the plug-in did not force.

    ``budget`` if the thought is longer than vLLM's budget, because vLLM does not report its own
    closes; otherwise ``natural``.
    """
    is_over = budget_tokens is not None and think_tokens > budget_tokens
    return Reason.BUDGET if is_over else Reason.NATURAL


class Firing(NamedTuple):
    """A strategy's decision that a thought should be closed.

    Attributes:
        at: index, among the tokens just passed, of the token after which to close.
        why: the measured values and thresholds, as text.
    """

    at: int
    why: str


class Strategy:
    """Decides when one thought should be closed; each thought has its own instance.

    A strategy overrides the method for the signals that it uses. Both methods process all of their
    input, in order. A signal that is not finite is ignored and never fires.
    """

    reason: Reason
    # ``accept`` never fires before this many think tokens; until then tokens may be stored.
    fires_from: float = 0

    def accept(self, token_ids: Sequence[int], signals: Signals, first: int) -> Firing | None:
        """Process the thought's next tokens.

        Args:
            token_ids: accepted tokens of one or more steps.
            signals: signals of these tokens.
            first: index of the first token at which the strategy may fire.

        Returns:
            The first firing at or after ``first``; None if there is none.
        """
        del token_ids, signals, first
        return None

    def probed(self, entropy_nats: float) -> str | None:
        """Process the entropy after a trial boundary; returns why to close now, or None."""
        del entropy_nats
        return None
