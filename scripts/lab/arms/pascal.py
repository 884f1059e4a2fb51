"""PASCAL: a queue of thinkers and a queue of answers, both in rounds of a quantum.

Source: PASCAL (HPCA'26, arXiv 2602.11530), from a reading note and the abstract: no code is
published. Thinkers are in the high queue, answers in the low one; a thinker past 5,000 tokens is
demoted to the low one; in each queue requests take turns of 500 tokens; a pacer shows an answer at
the reader's pace, so that an answer may be preempted while its reader has tokens left to read.
Deviations: one engine, so no placement and no migration; a preempted request computes its tokens
again, where PASCAL's simulator swaps them; the pacer is a rule of order: an answer with fewer than
``buffer_tokens`` unread has a turn before all others.
"""

from typing import Any

from arms.base import FIRST, Arm, Rank


class Pascal(Arm):
    """As published.

    Attributes:
        quantum: tokens of a turn.
        demoted_tokens: a thinker past so many is in the low queue.
        reading_s: the reader's pace, seconds per token.
        buffer_tokens: unread tokens below which an answer is urgent, for a turn.
    """

    displaces = True
    quantum: int = 500
    demoted_tokens: int = 5_000
    reading_s: float = 0.05
    buffer_tokens: int = 20

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_turns = 0
        # Of each request: the number of its turn, and its output tokens when that ends.
        self._turns: dict[str, tuple[int, int]] = {}
        # When an answer's first token came, and how many output tokens there were before.
        self._shown: dict[str, tuple[float, int]] = {}
        # Of urgent answers, the output tokens up to which they are.
        self._urgent: dict[str, int] = {}

    def rank(self, request: Any) -> Rank:
        name = request.request_id
        if name in self.answering:
            is_low = True
            if self._is_urgent(request):
                return FIRST
        else:
            is_low = request.num_output_tokens > self.demoted_tokens
        return is_low, self._turns[name][0]

    def added(self, request: Any) -> None:
        self._next_turn(request)

    def ran(self, request: Any, num_tokens: int) -> None:
        name = request.request_id
        if name in self.answering and name not in self._shown:
            self._shown[name] = self.clock(), request.num_output_tokens
        if request.num_output_tokens >= self._turns[name][1]:
            self._next_turn(request)

    def left(self, request: Any) -> None:
        del self._turns[request.request_id]
        self._shown.pop(request.request_id, None)
        self._urgent.pop(request.request_id, None)

    def before_step(self) -> None:
        # A preempted answer becomes urgent while it waits.
        if any(request.request_id in self.answering for request in self.waiting):
            self.reorder()

    def _next_turn(self, request: Any) -> None:
        self._num_turns += 1
        end = request.num_output_tokens + self.quantum
        self._turns[request.request_id] = self._num_turns, end

    def _is_urgent(self, request: Any) -> bool:
        name, tokens = request.request_id, request.num_output_tokens
        if tokens >= self._urgent.get(name, 0) and self._unread(request) < self.buffer_tokens:
            self._urgent[name] = tokens + self.quantum
        return tokens < self._urgent.get(name, 0)

    def _unread(self, request: Any) -> float:
        since_s, before = self._shown.get(request.request_id, (self.clock(), 0))
        return request.num_output_tokens - before - (self.clock() - since_s) / self.reading_s


class PascalProtected(Pascal):
    """The same order of thinkers; answers first and never displaced, and the step cut."""

    answers_first = True
    cut_factor = 1.17
