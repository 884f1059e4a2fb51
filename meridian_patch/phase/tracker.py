"""Tracks the phase of each request from its accepted tokens.

Runs in the EngineCore process in every step, so it is optimised for speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import ROOT, BoundaryMatcher, Event
from meridian_patch.phase.thoughts import find_first_thought


class Phase(StrEnum):
    """What a request is doing."""

    PREFILL = "prefill"
    THINK = "think"
    ANSWER = "answer"


# Python finds a name of the module faster than a member of an enumeration.
_THINK, _ANSWER = Phase.THINK, Phase.ANSWER


@dataclass(slots=True)
class RequestPhase:
    """Phase state of one request."""

    # Known tokens, prompt first. The caller's own list: it grows as tokens are accepted.
    known: Sequence[int]
    # PREFILL until the first token is accepted.
    phase: Phase
    # The phase that the prompt ends in: the first token's phase.
    first_phase: Phase
    # Automaton state after the last accepted token.
    match_state: int
    # Known tokens when this phase began, prompt included.
    tokens_before: int
    # Index at which this request's own first thought begins.
    own_thought: int | None = None
    # Those of the served model.
    boundaries: Boundaries | None = None
    # Whether text before a thought that the model opens itself is reasoning, and its tokens.
    counts_preamble: bool = False
    preamble_tokens: int = 0
    # Where the prompt was not searched yet: finds the boundaries of the served model.
    matcher: BoundaryMatcher | None = None
    # Index at which the first thought in the prompt begins, once the prompt was searched.
    prompt_thought: int | None = None
    # Accepted think tokens of earlier phases.
    think_tokens_before: int = 0
    # Those among them that are tokens of end boundaries.
    marker_tokens: int = 0
    # Known tokens when tracking began: the prompt's.
    given_tokens: int = 0
    # True once a boundary ended thinking in this request's output.
    is_handed_off: bool = False
    # True once a tool call that may end a thought began: no marker in its arguments opens one.
    is_calling: bool = False
    # Whether no start marker opens another thought: the answer goes on to the end.
    is_final: bool = False
    # For an attentive request: number of known tokens from which on it must be observed.
    attends_from: int = 0
    # True for a request that thinks, has thought, or will think after its prefill.
    is_reasoning: bool = False

    @property
    def first_thought(self) -> int | None:
        """Index at which the first thought begins; it may be an earlier turn's in the prompt.

        The prompt is searched in the first call: few requests are asked.
        """
        if self.matcher is not None:
            prompt = self.known[: self.given_tokens]
            self.prompt_thought, self.matcher = find_first_thought(prompt, self.matcher), None
        return self.own_thought if self.prompt_thought is None else self.prompt_thought

    @property
    def given_think_tokens(self) -> int:
        """Tokens that the prompt has behind the start marker of the thought that it opens."""
        begin, known = self.own_thought, self.known
        if self.first_phase is not _THINK or self.boundaries is None or begin is None:
            return 0
        starts = (
            len(start)
            for start in self.boundaries.start
            if tuple(known[begin : begin + len(start)]) == start
        )
        return self.given_tokens - begin - max(starts, default=self.given_tokens - begin)

    @property
    def is_given(self) -> bool:
        """Whether the current phase is the one that the prompt ends in."""
        return self.tokens_before == self.given_tokens

    @property
    def tokens_in_phase(self) -> int:
        """Accepted tokens since this phase began.

        A boundary belongs to the phase that it ends, or to the answer that begins with it.
        """
        return len(self.known) - self.tokens_before

    @property
    def think_tokens(self) -> int:
        """Accepted think tokens over the whole request."""
        return self.think_tokens_before + (self.tokens_in_phase if self.phase is _THINK else 0)


class PhaseTracker:
    """Per-request phase state machine.

    A request starts in ``PREFILL``. Its first token moves it to ``THINK`` if the prompt's last
    boundary is a start, and to ``ANSWER`` otherwise. An end boundary moves it to ``ANSWER``, a new
    start boundary back to ``THINK``.

    Most tokens belong to no marker and change nothing. So each step checks all of its tokens
    together (``expects``), and calls ``observe`` only for the few requests that may change.

    Args:
        boundaries: boundaries of the served model; None makes every request single-phase.
        handoff_tokens: ``observe`` also reports the answer token with this index after a boundary.
    """

    def __init__(self, boundaries: Boundaries | None, handoff_tokens: int = 0) -> None:
        self._boundaries = boundaries
        self._matcher = BoundaryMatcher(boundaries) if boundaries else None
        self._first_ids = self._matcher.first_ids if self._matcher else frozenset()
        self._handoff_tokens = handoff_tokens
        self._states: dict[str, RequestPhase] = {}
        # Requests that any next token may change: without a token yet, within a marker, or in
        # their hand-off.
        self._attentive: dict[str, RequestPhase] = {}
        # Number of requests by phase; the sum is len(self).
        self.counts: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self._entered: dict[Phase, int] = {}
        # Number of tracked requests with is_reasoning.
        self.num_reasoning = 0
        # Number of tracked requests whose first token will begin a thought.
        self._num_to_think = 0
        # Whether any request ever opened a thought that its prompt had not opened.
        self.has_opened = False

    @property
    def has_boundaries(self) -> bool:
        """Whether the served model has think boundaries."""
        return self._boundaries is not None

    @property
    def num_thinking(self) -> int:
        """Number of tracked requests that think, or will with their first token."""
        return self.counts[_THINK] + self._num_to_think

    def __len__(self) -> int:
        return len(self._states)

    def ids(self) -> list[str]:
        """Ids of the tracked requests."""
        return list(self._states)

    def get(self, request_id: str) -> RequestPhase | None:
        """State of a request; None if it is not tracked."""
        return self._states.get(request_id)

    def add(self, request_id: str, known: Sequence[int]) -> None:
        """Track a request; a known id starts anew, as for the next turn of a streaming session.

        Args:
            request_id: the request's unique id.
            known: its tokens so far; the caller appends accepted tokens to this list.
        """
        self.remove(request_id)
        first_phase, match_state = Phase.ANSWER, ROOT
        own_thought = None
        event = Event.NONE
        if self._matcher:
            event, begin = self._matcher.last_boundary(known)
            if event is Event.START:
                first_phase, own_thought = Phase.THINK, begin
            match_state = self._matcher.state_after(known)
        given = len(known)
        state = RequestPhase(known, Phase.PREFILL, first_phase, match_state, given)
        state.given_tokens = given
        state.own_thought = own_thought
        state.boundaries = self._boundaries
        # Where the prompt has no turns, all of it was searched.
        if event is not Event.NONE or (self._boundaries and self._boundaries.turn_start):
            state.matcher = self._matcher
        # What follows a thought that the prompt closes is an answer to every parser.
        if self._boundaries is not None and event is Event.NONE:
            state.counts_preamble = self._boundaries.counts_preamble
        if event is Event.END and self._matcher is not None:
            # Without a turn, the end may be that of an earlier one.
            state.is_final = self._matcher.ends_all and self._matcher.has_turn(known)
        self._states[request_id] = state
        self.counts[Phase.PREFILL] += 1
        if first_phase is Phase.THINK:
            self._num_to_think += 1
            self._mark_reasoning(state)

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._attentive.pop(request_id, None)
        state = self._states.pop(request_id, None)
        if state is not None:
            self.counts[state.phase] -= 1
            self._num_to_think -= _is_to_think(state)
            self.num_reasoning -= state.is_reasoning

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in list(self._states):
            self.remove(request_id)

    def runs(self, request_id: str) -> None:
        """Note a request in a step that may make its first token; unknown ids are ignored."""
        state = self._states.get(request_id)
        if state is not None and state.phase is Phase.PREFILL:
            state.attends_from = 0
            self._attentive[request_id] = state

    def expects(
        self, sampled: Sequence[Sequence[int]], index_of: Mapping[str, int]
    ) -> dict[str, int]:
        """The requests to ``observe`` once these tokens are accepted.

        Args:
            sampled: tokens of a step, one row per request; empty for a request without a sample.
            index_of: index of the row by request id.

        Returns:
            The present number of known tokens by request id, to be passed to ``observe``.
        """
        expected: dict[str, int] = {}
        if not sampled:
            # Pooling models sample nothing.
            return expected
        for name, attentive in self._attentive.items():
            index = index_of.get(name)
            known = len(attentive.known)
            if index is not None and known + len(sampled[index]) >= attentive.attends_from:
                expected[name] = known
        if not self._first_ids.isdisjoint(chain.from_iterable(sampled)):
            for name, row in index_of.items():
                state = self._states.get(name)
                if state is not None and not self._first_ids.isdisjoint(sampled[row]):
                    expected[name] = len(state.known)
        return expected

    def observe(self, request_id: str, seen: int) -> bool:
        """Process the tokens of a request after its first ``seen`` known tokens.

        Returns:
            Whether the request's rank may have changed: its phase changed or its hand-off ended.
        """
        state = self._states.get(request_id)
        if state is None or len(state.known) <= seen:
            return False
        is_changed = False
        if state.phase is Phase.PREFILL:
            self._enter(state, state.first_phase, seen)
            is_changed = True
        for index in range(seen, len(state.known)):
            token_id = state.known[index]
            if state.match_state != ROOT or token_id in self._first_ids:
                is_changed |= self._match(state, token_id, index + 1)
        is_handing_off = (
            state.phase is _ANSWER
            and state.is_handed_off
            and state.tokens_in_phase < self._handoff_tokens
        )
        is_matching = state.match_state != ROOT
        if is_handing_off or is_matching:
            state.attends_from = 0 if is_matching else state.tokens_before + self._handoff_tokens
            self._attentive[request_id] = state
        else:
            self._attentive.pop(request_id, None)
        was_handing_off = state.is_handed_off and seen - state.tokens_before < self._handoff_tokens
        return is_changed or (state.phase is _ANSWER and was_handing_off and not is_handing_off)

    def resync(self, request_id: str) -> bool:
        """Find the phase from all known tokens, after ``observe`` failed for some of them.

        Returns:
            Whether the phase changed.
        """
        state = self._states.get(request_id)
        if state is None or self._matcher is None or len(state.known) <= state.tokens_before:
            return False
        before = state.phase
        if before is Phase.PREFILL:
            self._enter(state, state.first_phase, state.tokens_before)
        event, begin = self._last_boundary(state)
        if event is Event.END:
            state.is_final |= self._matcher.ends_all
        if event is Event.END and state.phase is _THINK:
            state.is_handed_off = True
            self._enter(state, _ANSWER, len(state.known))
        elif (
            event is Event.START
            and state.phase is _ANSWER
            and not (state.is_calling or state.is_final)
        ):
            self._open_thought(state, begin, len(state.known))
        state.match_state = self._matcher.state_after(state.known)
        state.attends_from = 0
        self._attentive[request_id] = state
        return state.phase is not before

    def drain_entered(self) -> dict[Phase, int]:
        """How often a request entered each phase since the last call."""
        entered, self._entered = self._entered, {}
        return entered

    def _match(self, state: RequestPhase, token_id: int, known: int) -> bool:
        assert self._matcher is not None
        state.match_state, event = self._matcher.step(state.match_state, token_id)
        state.is_calling |= self._matcher.begins_answer(state.match_state)
        state.is_final |= event is Event.END and self._matcher.ends_all
        if event is Event.END and state.phase is Phase.THINK:
            state.is_handed_off = True
            # A marker that the prompt or the start marker began has fewer tokens in the thought.
            own = known - state.tokens_before
            num_marker = min(self._matcher.marker_tokens(state.match_state), own)
            if state.is_calling:
                self._enter(state, Phase.ANSWER, known - num_marker)
            else:
                state.marker_tokens += num_marker
                self._enter(state, Phase.ANSWER, known)
            return True
        is_final = state.is_final or state.is_calling
        if event is Event.START and state.phase is Phase.ANSWER and not is_final:
            if state.counts_preamble and state.own_thought is None:
                num_marker = self._matcher.marker_tokens(state.match_state)
                state.preamble_tokens = max(known - num_marker - state.given_tokens, 0)
            self._open_thought(state, known - self._matcher.longest_start, known)
            return True
        return False

    def _last_boundary(self, state: RequestPhase) -> tuple[Event, int]:
        """The boundary that decides the phase behind all known tokens."""
        assert self._matcher is not None
        if not self._matcher.ends_all:
            return self._matcher.last_boundary(state.known, state.given_tokens)
        found, before = (Event.NONE, 0), state.tokens_before
        for event, first, _ in self._matcher.find_all(state.known[before:]):
            found = event, before + first
            if event is Event.END:
                break
        return found

    def _open_thought(self, state: RequestPhase, begin: int, known: int) -> None:
        self._mark_reasoning(state)
        self.has_opened = True
        if state.own_thought is None:
            state.own_thought = begin
        self._enter(state, _THINK, known)

    def _mark_reasoning(self, state: RequestPhase) -> None:
        self.num_reasoning += not state.is_reasoning
        state.is_reasoning = True

    def _enter(self, state: RequestPhase, phase: Phase, known: int) -> None:
        """Begin a phase after the first ``known`` tokens."""
        self._num_to_think -= _is_to_think(state)
        self.counts[state.phase] -= 1
        self.counts[phase] += 1
        self._entered[phase] = self._entered.get(phase, 0) + 1
        if state.phase is _THINK:
            state.think_tokens_before += known - state.tokens_before
        state.tokens_before = known
        state.phase = phase


def _is_to_think(state: RequestPhase) -> bool:
    return state.phase is Phase.PREFILL and state.first_phase is _THINK
