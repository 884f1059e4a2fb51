"""Finds think boundaries in a token stream, one token at a time.

An Aho-Corasick automaton over token ids: a marker may consist of several tokens, span several steps
and have several spellings. One token takes O(1) amortised.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum

from meridian_patch.phase.boundaries import Boundaries, TokenIds

ROOT = 0

# Tokens per part of a backward search. Most prompts have a marker near their end.
_FIRST_PART, _PART = 64, 4096


class Event(IntEnum):
    """The boundary that the last token completed."""

    NONE = 0
    START = 1
    END = 2


class BoundaryMatcher:
    """Automaton for the start and end sequences of one model.

    The caller keeps one integer of state per stream; ``ROOT`` is the empty match.
    """

    def __init__(self, boundaries: Boundaries) -> None:
        self._edges: list[dict[int, int]] = [{}]
        self._events: list[Event] = [Event.NONE]
        # Tokens of the boundary that a state completes; 0: it completes none.
        self._lengths: list[int] = [0]
        # Whether a state completes an end with which the answer begins.
        self._begins: list[bool] = [False]
        # The same sequences from their ends, without failure links.
        self._edges_back: list[dict[int, int]] = [{}]
        self._events_back: list[Event] = [Event.NONE]
        self._longest = 0
        # Tokens of the longest start sequence.
        self.longest_start = max(map(len, boundaries.start), default=0)
        for sequences, event in ((boundaries.start, Event.START), (boundaries.end, Event.END)):
            for sequence in sequences:
                self._insert(sequence, event)
        for sequence in boundaries.implicit_end:
            self._begins[self._state_of(sequence)] = True
        self._failures = self._link()
        # Ids that open a turn of a prompt.
        self.turn_start = boundaries.turn_start
        # Whether no start marker behind an end opens another thought.
        self.ends_all = not boundaries.reopens
        self._last_ids = self.turn_start.union(self._edges_back[ROOT])
        # First tokens of all sequences. In state ROOT, other tokens need no step.
        self.first_ids = frozenset(self._edges[ROOT])

    def step(self, state: int, token_id: int) -> tuple[int, Event]:
        """Advance by one token; returns the new state and the boundary that it completes."""
        while state and token_id not in self._edges[state]:
            state = self._failures[state]
        state = self._edges[state].get(token_id, ROOT)
        return state, self._events[state]

    def marker_tokens(self, state: int) -> int:
        """Number of tokens of the boundary that ``state`` completes; 0: it completes none."""
        return self._lengths[state]

    def begins_answer(self, state: int) -> bool:
        """Whether ``state`` completes an end of a thought that is the answer's beginning."""
        return self._begins[state]

    def last_boundary(
        self, token_ids: Sequence[int], num_prompt: int | None = None
    ) -> tuple[Event, int]:
        """The last boundary in ``token_ids``, searched from the end, and the index of its start.

        Boundaries before the turn that the prompt ends in are text of messages and do not count.

        Parts without the last token of any marker are skipped by one C call each, which takes about
        12 ns per token instead of 60 ns in a loop. At such a token, no more is compared than equals
        a marker, and one token.

        Args:
            token_ids: a prompt, and output behind it.
            num_prompt: tokens of the prompt; None: all.

        Returns:
            ``Event.NONE`` and 0 when there is none.
        """
        num_prompt = len(token_ids) if num_prompt is None else num_prompt
        last_ids = self._last_ids
        stop, size = len(token_ids), _FIRST_PART
        while stop:
            start = max(0, stop - size)
            part = token_ids[start:stop]
            if not last_ids.isdisjoint(part):
                for index in range(stop - 1, start - 1, -1):
                    token_id = part[index - start]
                    if token_id in self.turn_start and index < num_prompt:
                        return Event.NONE, 0
                    if token_id in last_ids:
                        event, begin = self._ending_at(index, token_ids)
                        if event:
                            return event, begin
            stop, size = start, _PART
        return Event.NONE, 0

    def has_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether a turn begins in these tokens; a boundary before the last turn does not count."""
        return bool(self.turn_start) and not self.turn_start.isdisjoint(token_ids)

    def find_all(self, token_ids: Sequence[int]) -> Iterator[tuple[Event, int, int]]:
        """Each boundary, its first index and the index behind it, in order of the latter.

        Takes one pass, as far as it is iterated; parts without the first token of any marker are
        skipped as in ``last_boundary``.
        """
        state, first_ids = ROOT, self.first_ids
        for start in range(0, len(token_ids), _PART):
            part = token_ids[start : start + _PART]
            if state == ROOT and first_ids.isdisjoint(part):
                continue
            for behind, token_id in enumerate(part, start + 1):
                if state != ROOT or token_id in first_ids:
                    state, event = self.step(state, token_id)
                    if event:
                        yield event, behind - self._lengths[state], behind

    def state_after(self, token_ids: Sequence[int]) -> int:
        """State after ``token_ids``, which may end within a marker."""
        state = ROOT
        for token_id in token_ids[max(0, len(token_ids) - self._longest) :]:
            state, _ = self.step(state, token_id)
        return state

    def _ending_at(self, last: int, token_ids: Sequence[int]) -> tuple[Event, int]:
        """The longest boundary whose last token is at an index, and the index of its start."""
        found = Event.NONE, 0
        state = ROOT
        for index in range(last, -1, -1):
            state = self._edges_back[state].get(token_ids[index], ROOT)
            if state == ROOT:
                break
            if self._events_back[state]:
                found = self._events_back[state], index
        return found

    def _insert(self, sequence: TokenIds, event: Event) -> None:
        if not sequence:
            raise ValueError("a boundary needs at least one token")
        state = _add(sequence, self._edges, self._events)
        missing = len(self._edges) - len(self._lengths)
        self._lengths += [0] * missing
        self._begins += [False] * missing
        if self._events[state] not in {Event.NONE, event}:
            raise ValueError(f"tokens {sequence} both open and end thinking")
        self._events[state] = event
        self._lengths[state] = len(sequence)
        self._longest = max(self._longest, len(sequence))
        self._events_back[_add(sequence[::-1], self._edges_back, self._events_back)] = event

    def _state_of(self, sequence: TokenIds) -> int:
        state = ROOT
        for token_id in sequence:
            state = self._edges[state][token_id]
        return state

    def _link(self) -> list[int]:
        failures = [ROOT] * len(self._edges)
        queue = deque(self._edges[ROOT].values())
        while queue:
            state = queue.popleft()
            for token_id, child in self._edges[state].items():
                fallback = failures[state]
                while fallback and token_id not in self._edges[fallback]:
                    fallback = failures[fallback]
                failures[child] = self._edges[fallback].get(token_id, ROOT)
                if self._events[child] is Event.NONE:
                    self._events[child] = self._events[failures[child]]
                    self._lengths[child] = self._lengths[failures[child]]
                    self._begins[child] = self._begins[failures[child]]
                queue.append(child)
        return failures


def _add(sequence: TokenIds, edges: list[dict[int, int]], events: list[Event]) -> int:
    """State behind ``sequence``; states that are missing are added."""
    state = ROOT
    for token_id in sequence:
        if token_id not in edges[state]:
            edges[state][token_id] = len(edges)
            edges.append({})
            events.append(Event.NONE)
        state = edges[state][token_id]
    return state
