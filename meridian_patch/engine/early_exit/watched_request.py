"""What early exit keeps of one request, from its arrival to its end."""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RepetitionDetectionParams

from meridian_patch.config.schema import ExitConfig
from meridian_patch.engine.early_exit.signals import Kept
from meridian_patch.exit.actions import Close, Obstacles
from meridian_patch.exit.controller import ExitController
from meridian_patch.exit.strategies.base import Signals
from meridian_patch.exit.strategies.loop import LoopBreaker
from meridian_patch.phase.boundaries import TokenIds
from meridian_patch.phase.tracker import RequestPhase
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

_NO_SIGNALS = Signals((), (), (), ())


@dataclass(slots=True)
class Closing:
    """A close that is being forced."""

    # Output index of the first forced token; None while a token is in flight that may end the
    # thought by itself.
    begin: int | None = None
    # The tokens that are forced from `begin` on.
    sequence: TokenIds = ()
    # Tokens to force before the close sequence; empty for a close that starts again.
    wrap_up: TokenIds = ()
    # Whether the request has drafts in the last step: the number of its new tokens is unknown then.
    has_drafts: bool = False
    # Whether a token of an answer fits behind the sequence.
    has_room: bool = True
    # Whether no thought may open again behind the close.
    is_last: bool = False
    # Whether all tokens of the close are known or in flight.
    is_said: bool = False


@dataclass(slots=True)
class AnswerLoop:
    """Looks for loops in one request's answers."""

    # Of the answer that begins behind so many known tokens; None: it has fired, or there is none.
    breaker: LoopBreaker | None = None
    begin: int = -1
    # Known tokens that the breaker has.
    seen: int = 0


@dataclass(slots=True, eq=False)
class WatchedRequest:
    """What early exit keeps of one request."""

    request: Any
    controller: ExitController
    state: RequestPhase
    config: ExitConfig
    # Whether the request sets options of early exit.
    has_options: bool
    # Whether its thoughts are measured, or only their ends recorded; None until its first step.
    is_measured: bool | None = None
    # Number of known tokens passed to the controller, and the signals of later think tokens. Most
    # tokens are only kept here, and passed on together.
    seen: int = 0
    kept: list[Kept] = field(default_factory=list)
    # From this number of known tokens on, each token is passed on. From the other two on, each end
    # of a line, or of a paragraph.
    fast_path_until: float = 0
    lines_from: float = 0
    paragraphs_from: float = 0
    # A close delayed while the last tokens may become a marker, and its limit in known tokens.
    due: Close | None = None
    due_by: int = 0
    # The close that is being forced, and whether no further thought may open.
    closing: Closing | None = None
    is_barred: bool = False
    # A close given up for a reason that may pass: it is tried again at each end of a line.
    given_up: Close | None = None
    # How often structured output refused a close that had begun, each after a skipped step, and at
    # how many ends of lines it is not tried again.
    num_refused: int = 0
    lines_left: int = 0
    # Id of its live probe.
    probe_id: str | None = None
    # Sum over all thoughts that have ended, and indices of the tokens that their closes forced.
    think_tokens: int = 0
    forced: tuple[int, ...] = ()
    # Strategies that cannot close its thoughts, and whether its caller has the report.
    not_enforced: Obstacles = field(default_factory=dict)
    is_reported: bool = True
    # The last verdict in the trace.
    traced: Close | None = None
    # Set where its answers, too, are looked at for loops.
    answer: AnswerLoop | None = None

    @property
    def name(self) -> str:
        """The request's unique id."""
        return str(self.request.request_id)

    @property
    def thought_tokens(self) -> int:
        """Tokens of its thought behind the start marker, as vLLM's budget counts them."""
        state = self.state
        return state.tokens_in_phase + (state.given_think_tokens if state.is_given else 0)

    @property
    def has_close_begun(self) -> bool:
        """Whether a token of the close sequence has been forced."""
        return self.closing is not None and self.closing.begin is not None

    @property
    def forced_tokens(self) -> tuple[int, ...]:
        """Indices in the output of the known tokens that the close under way forced."""
        if self.closing is None or self.closing.begin is None:
            return ()
        end = self.closing.begin + len(self.closing.sequence)
        return tuple(range(self.closing.begin, min(end, self.request.num_output_tokens)))

    def thought_ended(self) -> None:
        """Drop what belongs to a thought; what belongs to the request stays."""
        self.due = self.given_up = None
        self.num_refused = self.lines_left = 0

    def stop_acting(self) -> None:
        """Only observe its thoughts from now on; one that is being closed is closed to the end."""
        self.config = self.config.model_copy(update={"mode": "observe"})
        self.controller.stop_acting()
        self.due = self.given_up = None

    def was_refused(self) -> None:
        """Note a close that had begun and that structured output refused."""
        self.num_refused += 1
        self.lines_left = 2**self.num_refused - 1

    def cannot(self, obstacles: Obstacles) -> None:
        """Note strategies that cannot close a thought; earlier reasons take precedence."""
        known = self.not_enforced
        if self.config.mode == "enforce" and not obstacles.keys() <= known.keys():
            self.not_enforced = {**obstacles, **known}
            self.is_reported = False

    def retries_close(self, *, at_line: bool) -> bool:
        """Whether to try a close again that was given up.

        Args:
            at_line: the last token ends a line.
        """
        if self.given_up is None or not at_line or self.config.mode != "enforce":
            return False
        self.lines_left -= 1
        return self.lines_left < 0

    def watch_answers(self) -> bool:
        """Look for loops in the answers, if the settings ask for it; returns whether they do.

        A request with vLLM's own check is left to that one.
        """
        config, is_own = self.config, self.request.sampling_params.repetition_detection is not None
        if config.loop and config.loop_scope == "all" and not is_own:
            self.answer = AnswerLoop()
        return self.answer is not None

    def look_at_answer(self, phase_counters: PhaseCounters) -> None:
        """Look for a loop in the answer's new tokens, and end the request if there is one.

        The loop breaker costs little per token, and vLLM's check much. So the breaker looks, and
        where it fires the request gets vLLM's check with the same settings: it ends at its next
        token if that one continues the loop, with vLLM's finish reason ``repetition``. In mode
        ``observe`` the loop is only counted.
        """
        answer, state, config = self.answer, self.state, self.config
        if answer is None:
            return
        if answer.begin != state.tokens_before:
            answer.begin = answer.seen = state.tokens_before
            answer.breaker = LoopBreaker.of_sizes(config)
        if answer.breaker is None:
            return
        tokens = state.known[answer.seen :]
        answer.seen += len(tokens)
        if answer.breaker.accept(tokens, _NO_SIGNALS, 0) is None:
            return
        answer.breaker = None
        phase_counters.count(counters.ANSWER_LOOP, config.mode)
        if config.mode != "enforce":
            return
        # Load-bearing: upstream reads this after each token. In one process the samples of a
        # request share their parameters.
        self.request.sampling_params = copy(self.request.sampling_params)
        self.request.sampling_params.repetition_detection = RepetitionDetectionParams(
            max_pattern_size=config.loop_max_pattern_size,
            min_pattern_size=config.loop_min_pattern_size,
            min_count=config.loop_min_count,
        )
