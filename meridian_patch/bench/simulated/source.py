"""Turns a trace into requests with token ids, in the form of the replayed model's chat template."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meridian_patch.bench.simulated.trace import TEMPLATE_TOKENS, History, TraceRequest
from meridian_patch.errors import BenchError
from meridian_patch.replay.player import Arrival
from meridian_patch.replay.scheduler import MAX_MODEL_LEN
from meridian_patch.replay.types import ReplayRecord, ReplayRequest, TemplateTokens


@dataclass(frozen=True)
class _Turn:
    """Token ids of one request and its output, without most of the template's markers.

    Attributes:
        user_turn: requests of one tool loop have the same number.
        new: the user's message, or the result of a tool.
        answer: begins with the tool call's marker if the answer calls a tool.
    """

    user_turn: int
    new: list[int]
    think: list[int]
    answer: list[int]


class TraceSource:
    """Plays a trace: single requests at their arrival times, later turns after the turn before.

    Token ids depend on the request's id and the seed. They are made when the engine first reads
    them.

    Args:
        trace: in the order of ``read_trace``: the turns of a session follow each other.
        template: of the replayed model.
        history: which earlier thoughts later prompts contain. With ``plain`` nothing thinks. With
            the others, a request without thinking has an empty thought in its prompt, as in
            Qwen3's template.
        seed: of the token ids.

    Attributes:
        live: session and turn of each live request.
        turns: the turns so far of each live session, whose token ids later prompts repeat.

    Raises:
        BenchError: a request is longer than the replayed model's context, or it thinks under
            ``plain``.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        template: TemplateTokens,
        history: History = History.STRIPPED,
        seed: int = 0,
    ) -> None:
        self._template = template
        self._history = history
        self._seed = seed
        self._sessions = _by_session(trace)
        self._check()
        self.live: dict[str, tuple[str, int]] = {}
        self.turns: dict[str, list[_Turn]] = {}

    def start(self) -> Iterator[Arrival]:
        """The first request of each session, and all single requests."""
        for session, requests in self._sessions.items():
            yield requests[0].arrival_s or 0.0, self._request(session, 0)

    def follow(self, record: ReplayRecord) -> Iterator[Arrival]:
        """The next turn, ``pause_s`` after the last token of the finished one."""
        session, turn = self.live.pop(record.request.request_id)
        requests = self._sessions[session]
        if turn + 1 < len(requests):
            yield record.token_s[-1] + requests[turn + 1].pause_s, self._request(session, turn + 1)
        else:
            del self.turns[session]

    def _check(self) -> None:
        for requests in self._sessions.values():
            for request, tokens in _session_tokens(requests, self._history):
                if tokens > MAX_MODEL_LEN:
                    raise BenchError(
                        f"request {request.id} of the trace may come to {tokens} tokens with all "
                        f"that stands before it, expected at most {MAX_MODEL_LEN}; shorten it"
                    )
                if request.think_tokens and self._history is History.PLAIN:
                    raise BenchError(
                        f"request {request.id} of the trace has think_tokens "
                        f"{request.think_tokens}, expected 0 under history plain; choose another"
                    )

    def _request(self, session: str, turn: int) -> ReplayRequest:
        request = self._sessions[session][turn]
        self.live[request.id] = session, turn
        return _LazyRequest(
            request.id,
            # The marker that ends the thought is not part of the answer.
            answer_start=request.think_tokens + 1 if request.think_tokens else 0,
            build=lambda: self._build(session, turn),
        )

    def _build(self, session: str, turn: int) -> tuple[list[int], list[int]]:
        """Prompt and output of a request, as the chat template renders them."""
        requests, template = self._sessions[session], self._template
        turns = self.turns.setdefault(session, [])
        turns.append(self._draw_turn(requests, turn))
        *earlier, now = turns
        system = f"system {requests[0].system}"
        prompt = [template.system, *self._ids(system, requests[0].shared_tokens)[0]]
        prompt.append(template.turn_end)
        for before in earlier:
            prompt += [template.user, *before.new, template.turn_end, template.assistant]
            is_in_loop = before.user_turn == now.user_turn
            if self._history is History.KEPT or (self._history is History.TOOL_LOOP and is_in_loop):
                prompt += [template.think_start, *before.think, template.think_end]
            prompt += [*before.answer, template.turn_end]
        prompt += [template.user, *now.new, template.turn_end, template.assistant]
        output = [*now.answer, template.turn_end]
        if self._history is History.PLAIN:
            return prompt, output
        if now.think:
            return [*prompt, template.think_start], [*now.think, template.think_end, *output]
        return [*prompt, template.think_start, template.think_end], output

    def _draw_turn(self, requests: Sequence[TraceRequest], turn: int) -> _Turn:
        request = requests[turn]
        new, think, answer = self._ids(
            f"request {request.id}",
            request.prompt_tokens - request.shared_tokens,
            request.think_tokens,
            request.answer_tokens,
        )
        calls_tool = turn + 1 < len(requests) and requests[turn + 1].is_tool_result
        call = self._template.tool_call if calls_tool else ()
        user_turn = sum(not later.is_tool_result for later in requests[1 : turn + 1])
        return _Turn(user_turn, new, think, [*call, *answer])

    def _ids(self, name: str, *counts: int) -> list[list[int]]:
        """Lists of token ids of plain text that depend on the name and the seed."""
        digest = hashlib.sha256(name.encode()).digest()
        rng = np.random.default_rng((self._seed, int.from_bytes(digest[:8])))
        return [rng.integers(0, self._template.content_ids, count).tolist() for count in counts]


class _LazyRequest(ReplayRequest):
    """A request whose token ids are made when the engine first reads them."""

    _build: Callable[[], tuple[list[int], list[int]]]

    def __init__(
        self,
        request_id: str,
        *,
        answer_start: int,
        build: Callable[[], tuple[list[int], list[int]]],
    ) -> None:
        # Not super().__init__: it would set ``prompt`` and ``output``, which are properties here.
        vars(self).update(request_id=request_id, answer_start=answer_start, _build=build)

    @cached_property
    def _tokens(self) -> tuple[list[int], list[int]]:
        return self._build()

    @property
    def prompt(self) -> list[int]:
        return self._tokens[0]

    @property
    def output(self) -> list[int]:
        return self._tokens[1]


def session_bounds(trace: Sequence[TraceRequest], history: History) -> list[int]:
    """Of each session, an upper bound of prompt and output of its longest request, in tokens.

    The bound is less than 1 % too high. A single request is a session of its own.
    """
    return [
        max(tokens for _, tokens in _session_tokens(requests, history))
        for requests in _by_session(trace).values()
    ]


def _by_session(trace: Sequence[TraceRequest]) -> dict[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = {}
    for request in trace:
        # The id of a single request may be the name of a session; the prefixes keep them apart.
        key = f"request {request.id}" if request.session is None else f"session {request.session}"
        sessions.setdefault(key, []).append(request)
    return sessions


def _session_tokens(
    requests: Sequence[TraceRequest], history: History
) -> Iterator[tuple[TraceRequest, int]]:
    """Each request and an upper bound of its prompt and output together."""
    rest = thoughts = 0
    for request in requests:
        if history is History.STRIPPED or (
            history is History.TOOL_LOOP and not request.is_tool_result
        ):
            thoughts = 0
        rest += request.prompt_tokens + request.answer_tokens + TEMPLATE_TOKENS
        thoughts += request.think_tokens
        yield request, rest + thoughts
