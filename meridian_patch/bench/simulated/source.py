"""Plays a lab trace: from lengths to token ids, turn by turn."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from meridian_patch.bench.simulated.conversations import (
    Conversation,
    Exchange,
    History,
    build_output,
    build_prompt,
)
from meridian_patch.bench.simulated.trace import TEMPLATE_TOKENS, LabRequest
from meridian_patch.errors import BenchError
from meridian_patch.replay.player import Arrival
from meridian_patch.replay.scheduler import MAX_MODEL_LEN
from meridian_patch.replay.types import Markers, ReplayRecord, ReplayRequest


class LabSource:
    """A trace as a source of requests: single ones open loop, sessions closed loop.

    Tokens depend on the request's id and the seed, and are made when a request is submitted.

    Args:
        trace: in the order of ``read_trace``: a session's turns follow each other.
        markers: of the replayed model.
        history: what stands of earlier thoughts in later prompts; with ``plain`` there is no
            thinking. Elsewhere a request without thinking has an empty thought in its prompt, as
            Qwen3's template renders it.
        seed: of the tokens.

    Raises:
        BenchError: a request is longer than the replayed model's context, or it thinks under
            ``plain``.
    """

    def __init__(
        self,
        trace: Sequence[LabRequest],
        markers: Markers,
        history: History = History.STRIPPED,
        seed: int = 0,
    ) -> None:
        self._markers = markers
        self._history = history
        self._seed = seed
        self._sessions = _by_session(trace)
        self._check()
        # Of a live request: its session and its turn.
        self._places: dict[str, tuple[str, int]] = {}
        # Tokens of what a session has said so far, while it lasts.
        self._exchanges: dict[str, list[Exchange]] = {}

    def start(self) -> Iterator[Arrival]:
        """The first request of each session, and all single ones."""
        for session, requests in self._sessions.items():
            yield requests[0].arrival_s or 0.0, self._request(session, 0)

    def follow(self, record: ReplayRecord) -> Iterator[Arrival]:
        """The next turn, a pause after the last token."""
        session, turn = self._places.pop(record.request.request_id)
        requests = self._sessions[session]
        if turn + 1 < len(requests):
            yield record.token_s[-1] + requests[turn + 1].pause_s, self._request(session, turn + 1)
        else:
            del self._exchanges[session]

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
        requests = self._sessions[session]
        request = requests[turn]
        self._places[request.id] = session, turn
        return _LazyRequest(
            request.id,
            # After the thought stands the marker that ends it.
            answer_start=request.think_tokens + 1 if request.think_tokens else 0,
            shared_tokens=request.shared_tokens + 1 if request.system else 0,  # with its marker
            is_last=turn + 1 == len(requests),
            build=lambda: self._build(session, turn),
        )

    def _build(self, session: str, turn: int) -> tuple[list[int], list[int]]:
        requests = self._sessions[session]
        exchanges = self._exchanges.setdefault(session, [])
        exchanges.append(self._exchange(requests, turn))
        conversation = Conversation(0.0, self._system(requests[0]), tuple(exchanges))
        prompt = build_prompt(conversation, turn, self._history, self._markers)
        if requests[turn].think_tokens or self._history is History.PLAIN:
            output, _ = build_output(exchanges[turn], self._history, self._markers)
        else:
            prompt.append(self._markers.think_end)
            output, _ = build_output(exchanges[turn], History.PLAIN, self._markers)
        return prompt, output

    def _exchange(self, requests: Sequence[LabRequest], turn: int) -> Exchange:
        request = requests[turn]
        new = request.prompt_tokens - request.shared_tokens
        lengths = (new, request.think_tokens, request.answer_tokens)
        given, think, answer = self._texts(f"request {request.id}", lengths)
        # Within a tool loop, requests share the number of the user's turn.
        user_turn = sum(not earlier.is_tool_result for earlier in requests[1 : turn + 1])
        calls_tool = turn + 1 < len(requests) and requests[turn + 1].is_tool_result
        return Exchange(user_turn, request.pause_s, given, think, answer, is_tool_call=calls_tool)

    def _system(self, request: LabRequest) -> list[int]:
        return self._texts(f"system {request.system}", (request.shared_tokens,))[0]

    def _texts(self, name: str, lengths: Sequence[int]) -> list[list[int]]:
        digest = hashlib.sha256(name.encode()).digest()
        rng = np.random.default_rng((self._seed, int.from_bytes(digest[:8])))
        return [rng.integers(0, self._markers.content_ids, count).tolist() for count in lengths]


class _LazyRequest(ReplayRequest):
    """A request whose tokens are made when the engine first asks for them."""

    _build: Callable[[], tuple[list[int], list[int]]]

    def __init__(
        self,
        request_id: str,
        *,
        answer_start: int,
        shared_tokens: int,
        is_last: bool,
        build: Callable[[], tuple[list[int], list[int]]],
    ) -> None:
        # The dataclass is frozen and would set the tokens too.
        vars(self).update(
            request_id=request_id,
            answer_start=answer_start,
            shared_tokens=shared_tokens,
            is_last=is_last,
            _build=build,
        )

    @cached_property
    def _tokens(self) -> tuple[list[int], list[int]]:
        return self._build()

    @property
    def prompt(self) -> list[int]:
        return self._tokens[0]

    @property
    def output(self) -> list[int]:
        return self._tokens[1]


def longest_request_tokens(trace: Sequence[LabRequest], history: History = History.STRIPPED) -> int:
    """At least the prompt and output of the longest request, in tokens; above by under 1 %.

    Raises:
        BenchError: the trace holds no request.
    """
    if not trace:
        raise BenchError("the trace holds no request, expected one or more")
    return max(
        tokens
        for requests in _by_session(trace).values()
        for _, tokens in _session_tokens(requests, history)
    )


def _by_session(trace: Sequence[LabRequest]) -> dict[str, list[LabRequest]]:
    sessions: dict[str, list[LabRequest]] = {}
    for request in trace:
        # The prefixes keep the id of a single request apart from the name of a session.
        key = f"request {request.id}" if request.session is None else f"session {request.session}"
        sessions.setdefault(key, []).append(request)
    return sessions


def _session_tokens(
    requests: Sequence[LabRequest], history: History
) -> Iterator[tuple[LabRequest, int]]:
    """Each request and an upper bound of its prompt and output together."""
    said = thoughts = 0
    for request in requests:
        if history is History.STRIPPED or (
            history is History.TOOL_LOOP and not request.is_tool_result
        ):
            thoughts = 0
        said += request.prompt_tokens + request.answer_tokens + TEMPLATE_TOKENS
        thoughts += request.think_tokens
        yield request, said + thoughts
