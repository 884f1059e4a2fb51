"""What every request was owed and got: each delivered token is checked against the oracle."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from short_thoughts import short_thoughts
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from meridian_patch.exit.strategies.answer_reserve import AnswerReserve
from meridian_patch.phase.boundaries import Boundaries
from simulator.axes import Case
from simulator.failure import Failure
from simulator.oracle import TURN_END, WRAP_UP_IDS, Speaker, starts_thinking
from simulator.workload import Ask

# Of the exit settings of every case, see ``build``.
FLOOR_TOKENS = 16
# Tokens that may still come before a close that has begun when early exit is switched off.
UNDER_WAY = 16


@dataclass
class Record:
    """One request and what came of it.

    Attributes:
        request: vLLM's.
        finish: how it ended; None while it has not.
        most_tokens: upper bound of all thoughts; None: there is none.
        is_bounded: it has that or a reserve for its answer.
        closes: output indices at which a close of ours began, of the present chunk.
        answered_s: when its first token behind a thought was delivered; None: none was.
        last_close: output index behind which no close may begin.
    """

    ask: Ask
    request: Any
    speaker: Speaker
    prompt: list[int]
    may_close: bool
    floor_tokens: int
    most_tokens: int | None
    is_bounded: bool
    finish: str | None = None
    closes: list[int] = field(default_factory=list)
    answered_s: float | None = None
    last_close: float = math.inf

    @property
    def is_over(self) -> bool:
        return self.finish is not None


class Ledger:
    """The records of one arm.

    Args:
        is_stock: nothing is closed early there.
    """

    def __init__(self, case: Case, boundaries: Boundaries | None, *, is_stock: bool) -> None:
        self._case = case
        self.boundaries = boundaries
        self._is_stock = is_stock
        self._close = close_sequence(boundaries) if boundaries else ()
        # What a close may say: with its wrap-up, or bare where that does not fit.
        self._closes = [self._close]
        if case.wrap_up:
            self._closes.insert(0, (*WRAP_UP_IDS, *self._close))
        self.records: dict[str, Record] = {}
        # Those that ended by themselves since the last call of ``take_ended``.
        self._ended: list[Record] = []
        # Requests whose KV could not be loaded, and that may end by an error.
        self.failed_loads: set[str] = set()
        self.num_closes = 0
        self.num_tokens = 0
        # Of requests to come.
        self.exit_mode = case.exit

    def speaker_for(self, name: str, prompt: Sequence[int]) -> Speaker | None:
        """A speaker of its own for a request; None for one that no user sent."""
        record = self.records.get(name)
        if record is None:
            return None
        thinks = starts_thinking(prompt, self.boundaries)
        return Speaker(record.ask.script, self.boundaries, thinks=thinks)

    def add(self, ask: Ask, request: Any) -> None:
        thinks = starts_thinking(ask.prompt, self.boundaries)
        speaker = Speaker(ask.script, self.boundaries, thinks=thinks)
        floor = ask.extra.get("meridian_min_think_tokens", FLOOR_TOKENS)
        has_reserve = "meridian_answer_reserve" in ask.extra
        has_reserve |= self._case.strategy == AnswerReserve.reason
        if has_reserve:
            # What the answer needs takes precedence.
            floor = 0
        bounds = [
            ask.extra.get("meridian_max_think_tokens"),
            short_thoughts(self._case.strategy).get("max_think_tokens"),
        ]
        most = next((bound for bound in bounds if bound is not None), None)
        self.records[ask.name] = Record(
            ask,
            request,
            speaker,
            list(ask.prompt),
            may_close=self._may_close(ask),
            floor_tokens=floor,
            most_tokens=most,
            is_bounded=has_reserve or most is not None,
        )

    def _may_close(self, ask: Ask) -> bool:
        mode = ask.extra.get("meridian_exit", self.exit_mode)
        return mode == "enforce" and not self._is_stock

    def switch_exit(self, mode: str) -> None:
        """Early exit's mode was switched: without ``enforce`` no close begins in what runs."""
        self.exit_mode = mode
        for record in self.records.values():
            if mode != "enforce" and "meridian_exit" not in record.ask.extra:
                record.last_close = min(record.last_close, len(record.speaker.said) + UNDER_WAY)

    def take(self, outputs: dict[int, Any], now_s: float) -> None:
        """What a step's ``update_from_output`` returned."""
        for client in outputs.values():
            for item in client.outputs:
                record = self.records.get(item.request_id)
                if record is None:
                    raise Failure("tokens", f"output of {item.request_id}, which no user sent")
                self._take_one(record, item)
                if record.answered_s is None and not record.speaker.is_thinking:
                    record.answered_s = now_s

    def take_ended(self) -> list[Record]:
        ended, self._ended = self._ended, []
        return ended

    def aborted(self, name: str) -> None:
        record = self.records[name]
        if not record.is_over:
            record.finish = "abort"

    def went_on(self, record: Record) -> None:
        """A session goes on with its next chunk, which vLLM has made its prompt."""
        prompt = list(record.request.prompt_token_ids)
        known = [*record.prompt, *record.speaker.said]
        common = 0
        while common < min(len(known), len(prompt)) and known[common] == prompt[common]:
            common += 1
        # What was sampled last is computed by no step, and drafts behind an end are none.
        if common < len(record.prompt):
            raise Failure("tokens", f"{record.ask.name} lost prompt tokens between two chunks")
        # Stock forgets what a session said whose turn ends while it is preempted.
        if not self._is_stock and prompt[: len(known) - 1] != known[:-1]:
            raise Failure("tokens", f"{record.ask.name} forgot what it said between two chunks")
        record.prompt = prompt
        thinks = starts_thinking(prompt, self.boundaries)
        record.speaker = Speaker(record.ask.script, self.boundaries, thinks=thinks)
        record.closes.clear()
        record.may_close, record.last_close = self._may_close(record.ask), math.inf

    def _take_one(self, record: Record, item: Any) -> None:
        name = item.request_id
        if record.is_over:
            raise Failure("place", f"{name} ended by {record.finish} and has an output after that")
        for token in item.new_token_ids:
            self._hear(record, token)
        if item.new_token_ids:
            self.num_tokens += len(item.new_token_ids)
        if len(record.prompt) + len(record.speaker.said) > self._case.length:
            raise Failure("tokens", f"{name} is longer than {self._case.length}")
        if item.finish_reason is not None:
            self._end(record, item.finish_reason)

    def _hear(self, record: Record, token: int) -> None:
        speaker, name = record.speaker, record.ask.name
        wanted = speaker.next()
        if token != wanted:
            if record.may_close and self._is_barred(record, wanted):
                speaker.hear(token)
                return
            begin = self._begin_of_close(speaker.said, token)
            place = f"{name} says {token} at output token {len(speaker.said)}, not {wanted}"
            if begin is None or not record.may_close:
                raise Failure("tokens", place)
            if not speaker.is_thinking:
                raise Failure("tokens", f"{place}: a close behind the end of the thought")
            began = len(speaker.said) - begin
            thought = speaker.in_phase - (len(speaker.said) - began)
            left = _left(record, speaker.think_tokens - speaker.in_phase)
            if thought < min(record.floor_tokens, left) - len(self._close):
                raise Failure("tokens", f"{place}: closed after {thought} think tokens")
            if began not in record.closes:
                if began > record.last_close:
                    raise Failure("switch", f"{place}: closed though early exit was switched off")
                record.closes.append(began)
                self.num_closes += 1
        speaker.hear(token)

    def _is_barred(self, record: Record, wanted: int) -> bool:
        """Whether a request would open another thought behind a close, which may be its last.

        Where it ends its thought by itself on the token of a close at a bound, none shows.
        """
        starts = self.boundaries.start if self.boundaries else ()
        is_closed = record.closes or record.is_bounded
        return bool(is_closed) and not record.speaker.is_thinking and (wanted,) in starts

    def _begin_of_close(self, said: list[int], token: int) -> int | None:
        """How many tokens of a close stand before ``token``; None: it is none of a close's."""
        for close in self._closes:
            for index in range(len(close) - 1, -1, -1):
                behind = said[len(said) - index :] if index else []
                if close[index] == token and tuple(behind) == close[:index]:
                    return index
        return None

    def _end(self, record: Record, reason: FinishReason) -> None:
        said, ask, name = record.speaker.said, record.ask, record.ask.name
        request = record.request
        last = said[-1] if said else None
        is_eos = last == TURN_END and not ask.sampling.get("ignore_eos")
        is_stop = is_eos or last in ask.stops
        total = len(record.prompt) + len(said)
        max_tokens = request.sampling_params.max_tokens
        is_length = len(said) >= max_tokens or total >= self._case.length
        if ask.session is not None:
            # Its parameters are the next chunk's already.
            is_length = True
        expected = {FinishReason.STOP: is_stop, FinishReason.LENGTH: is_length}
        if self._case.has_fault("load_failure") and record.request.request_id in self.failed_loads:
            expected[FinishReason.ERROR] = True
        if reason is FinishReason.ABORT and ask.session is not None:
            expected[reason] = True
        if not expected.get(reason, False):
            raise Failure(
                "tokens",
                f"{name} ends by {reason!s} after {len(said)} tokens, the last of them {last}",
            )
        if ask.session is None:
            record.finish = str(reason)
            self._ended.append(record)
            return
        if request.is_finished():
            record.finish = str(reason)
        elif request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            self.went_on(record)


def _left(record: Record, think_tokens: int) -> float:
    """Think tokens that the bound leaves behind so many."""
    return math.inf if record.most_tokens is None else max(record.most_tokens - think_tokens, 0)


def close_sequence(boundaries: Boundaries) -> tuple[int, ...]:
    """The close sequence up to the end of the thought."""
    for length in range(1, len(boundaries.close) + 1):
        part = boundaries.close[:length]
        if any(part[-len(end) :] == end for end in boundaries.end):
            return part
    return boundaries.close
