"""Follows a request's phase outside of EngineCore, from the changes that the tracker reports."""

from typing import TYPE_CHECKING, NamedTuple

from meridian_patch.phase.tracker import Phase, RequestPhase

if TYPE_CHECKING:
    from meridian_patch.phase.phase_log import PhaseLog

THINK, ANSWER, TURNING = range(3)
"""Where the last token of a request stands; ``TURNING``: the answer has no token yet."""


class PhaseChange(NamedTuple):
    """A request's phase after a step that changed it; plain values, sent between processes.

    Attributes:
        is_thinking: whether the request is in a thought; None: not known any more.
        begin: index of the first output token of this phase.
        reasoning_tokens: output tokens of thoughts before it, without those of end boundaries; with
            those before the first thought where they are reasoning to the server's parser.
    """

    is_thinking: bool | None
    begin: int
    reasoning_tokens: int

    @classmethod
    def unknown(cls) -> "PhaseChange":
        """The phase of a request that the tracker will not follow any longer."""
        return cls(None, 0, 0)

    @classmethod
    def of(cls, state: RequestPhase) -> "PhaseChange":
        """What the tracker knows of a request that has tokens."""
        return cls(
            state.phase is Phase.THINK,
            state.tokens_before - state.given_tokens,
            state.think_tokens_before - state.marker_tokens + state.preamble_tokens,
        )


class PhaseProgress:
    """Phase, counts and times of one request, or of one turn of a session.

    A gap is the time between the outputs of two steps. It belongs to the phase of the token before
    it; the one from an end boundary to the first answer token belongs to neither phase.

    Attributes:
        place: ``THINK``, ``ANSWER`` or ``TURNING``; None: unknown, so there is no count.
        num_tokens: output tokens so far.
        last_s: engine time of the last output, in seconds; None: there was none, or vLLM keeps
            no statistics.
        ttfat_s: seconds from arrival to the first answer token; None: there is none yet. Until the
            request has thought it is that of its first token, and a thought takes it back.
        has_thought: whether the request ever thought.
        is_told: whether ``ttfat_s`` is final and was observed.
        is_stopped: whether the last token ended the request: an end-of-sequence or another stop
            token, which is part of neither thought nor answer.
        log: when its phases began and ended; None: it is not kept.
    """

    __slots__ = (
        "_change",
        "_entered_s",
        "_spent_s",
        "has_thought",
        "is_stopped",
        "is_told",
        "last_s",
        "log",
        "num_tokens",
        "place",
        "ttfat_s",
    )

    def __init__(self) -> None:
        self.place: int | None = None
        self.num_tokens = 0
        # Seconds in phases that are over, and when this one began.
        self._spent_s = [0.0, 0.0]
        self._entered_s: float | None = None
        self.last_s: float | None = None
        self.ttfat_s: float | None = None
        self.has_thought = False
        self.is_told = False
        self.is_stopped = False
        self.log: PhaseLog | None = None
        self._change: PhaseChange | None = None

    @property
    def phase_begin(self) -> int:
        """Index of the first output token of this phase; of the next token if it is unknown."""
        return self.num_tokens if self._change is None else self._change.begin

    def take(self, change: PhaseChange | None, num_new: int) -> int:
        """Take in a step's tokens in the order in which they were accepted.

        Args:
            change: the phase after the step; None: it is the one before.
            num_new: tokens of the step.

        Returns:
            How many of them are answer tokens.
        """
        before = self.place
        self.num_tokens += num_new
        if change is not None:
            self._change = change
        now = self._change
        if now is None:
            return 0
        if now.is_thinking is None:
            self.lose()
            return 0
        in_phase = min(max(self.num_tokens - now.begin, 0), num_new)
        if now.is_thinking:
            self.place = THINK
            self.has_thought = True
            if not self.is_told:
                self.ttfat_s = None
            # What stands before a thought that the model opened itself is no thought.
            return 0 if before in (None, THINK) else num_new - in_phase
        self.place = ANSWER if self.num_tokens > now.begin else TURNING
        if now.reasoning_tokens or before == THINK:
            self.has_thought = True
        return in_phase

    def moved(self, before: int | None, now_s: float) -> None:
        """Note the time of a step that may have changed the phase, after ``take``.

        Args:
            before: ``place`` before the step.
            now_s: the engine's time of the step, in seconds.
        """
        if self.place == before:
            return
        if before in (THINK, ANSWER) and self._entered_s is not None:
            self._spent_s[before] += now_s - self._entered_s
        self._entered_s = now_s

    def seconds_in(self, place: int) -> float:
        """Seconds spent in ``THINK`` or in ``ANSWER`` so far, up to the last output."""
        seconds = self._spent_s[place]
        if self.place == place and self._entered_s is not None and self.last_s is not None:
            seconds += self.last_s - self._entered_s
        return seconds

    def lose(self) -> None:
        """Forget the phase: from now on there is no count, and no time is kept."""
        self.place = self._change = self.last_s = None

    def reasoning_tokens(self, num_tokens: int) -> int | None:
        """Tokens of thoughts among the first ``num_tokens`` output tokens.

        Boundaries and the token that ended the request do not count.

        Thoughts that were still open count. None if the phase is unknown. The count is exact for
        all output tokens so far, and for fewer within the first phase; if a reader lags behind
        other changes, tokens that stand between thoughts may count until it has caught up.
        """
        now = self._change
        if now is None:
            return None
        if not now.is_thinking:
            return min(now.reasoning_tokens, num_tokens)
        if self.is_stopped:
            num_tokens = min(num_tokens, self.num_tokens - 1)
        return min(now.reasoning_tokens + max(num_tokens - now.begin, 0), num_tokens)
