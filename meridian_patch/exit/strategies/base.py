"""The interface of strategies: what each declares, its inputs and its results."""

from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple, Self

from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.text_breaks import Breaks

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


NATURAL: Final = "natural"
"""The reason of a thought that the model ended."""

BUDGET: Final = "budget"
"""The reason of a thought that vLLM ended at its own budget."""

UNANSWERED: Final = "unanswered"
"""The reason of a thought within which its request ended, by its length or by a stop token."""


def own_end(think_tokens: int, budget_tokens: int | None) -> str:
    """The reason of an end that the plug-in did not force.

    ``budget`` if the thought is longer than vLLM's budget, because vLLM does not report its own
    closes; otherwise ``natural``.

    Args:
        think_tokens: of the thought, its end marker included.
        budget_tokens: what vLLM's budget leaves behind the part that the prompt has; None: vLLM
            bounds the thought by none.
    """
    is_over = budget_tokens is not None and think_tokens > budget_tokens
    return BUDGET if is_over else NATURAL


def budget_left(budget_tokens: int | None, given_tokens: int) -> int | None:
    """What vLLM's budget leaves to a thought of which the prompt has a part; None: no budget.

    vLLM counts from the start marker on, wherever it stands.
    """
    return None if budget_tokens is None else max(budget_tokens - given_tokens, 0)


class ThoughtStart(NamedTuple):
    """What is known of a thought when its strategies are built.

    Attributes:
        breaks: text breaks of the served vocabulary.
        budget_tokens: what vLLM's ``thinking_token_budget`` leaves behind the part of the thought
            that the prompt has; None: there is none.
        think_tokens: number of tokens that the thought has already.
        earlier_tokens: think tokens of the request before this thought.
        room_tokens: think tokens behind which a close must begin, so that the answer has its
            reserve; None: there is none.
    """

    breaks: Breaks
    budget_tokens: int | None = None
    think_tokens: int = 0
    earlier_tokens: int = 0
    room_tokens: int | None = None


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

    A strategy overrides ``of`` and the method for the signals that it uses. Both methods process
    all of their input, in order. A signal that is not finite is ignored and never fires.

    The first paragraph of a strategy's docstring says when it closes, for docs/early-exit.md.
    """

    # Its name: of its switch in ``ExitConfig``, of ``exit_reason`` in responses, and in metrics.
    reason: ClassVar[str]
    # What requests.md says of a thought that it closed.
    words: ClassVar[str]
    # With what the names of its settings begin; empty: with its reason.
    settings: ClassVar[tuple[str, ...]] = ()
    # Callers are told where an engine has none of what it uses.
    uses_signals: ClassVar[bool] = False
    uses_probes: ClassVar[bool] = False
    # It only bounds a thought's length. At the same token the reason of any other says more.
    is_bound: ClassVar[bool] = False
    # ``accept`` never fires before this many think tokens; until then tokens may be stored.
    fires_from: float = 0

    @classmethod
    def is_on(cls, config: ExitConfig, start: ThoughtStart | None = None) -> bool:
        """Whether thoughts have this strategy: by default its switch.

        Args:
            config: the request's configuration.
            start: what is known of a thought; None: whether any thought may have it.
        """
        del start
        return bool(getattr(config, cls.reason))

    @classmethod
    def of(cls, config: ExitConfig, start: ThoughtStart) -> Self:
        """One of a new thought; called only where it is on."""
        raise NotImplementedError

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
