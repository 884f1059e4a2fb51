"""Serves a streamed request: it thinks on one engine, answers on another, and survives a loss."""

import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from meridian_patch.errors import ConfigError
from meridian_patch.handoff.requests import (
    has_grammar,
    ingest,
    releasing,
    resume,
    ticket_in,
)
from meridian_patch.router.attempts import Attempts, NoEngine, Services
from meridian_patch.router.engine import Engine, Role
from meridian_patch.router.engine_client import (
    EngineFailed,
    EngineRefused,
    Headers,
    take_abort,
    within,
)
from meridian_patch.router.stream_state import StreamState

logger = logging.getLogger("meridian.route")

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class _Leg:
    """What one engine is to serve of the request."""

    role: Role
    # None: the request from its beginning.
    body: Json | None = None
    # When its thought ended elsewhere; None for a request that was not handed off.
    ended_at: float | None = None
    # Of such a request: its ticket, and the engine that has its KV cache.
    ticket: Json | None = None
    holder: Engine | None = None
    # Whether another engine served its thought: nothing of its answer was held back there.
    is_handed: bool = False


class StreamRelay:
    """Serves one request.

    Args:
        services: what all requests share.
        path: of the endpoint.
        body: the request as the client sent it.
        headers: to pass on.
        attempts: engines that failed an earlier part; None if there was none.
    """

    def __init__(
        self,
        services: Services,
        path: str,
        body: Json,
        headers: Headers,
        attempts: Attempts | None = None,
    ) -> None:
        self._services = services
        self._path = path
        self._body = body
        self._headers = headers
        self._attempts = attempts or Attempts(services.pool, body)
        self._state = StreamState(body)
        self._ticket: Json | None = None

    @property
    def usage(self) -> Json | None:
        """The usage of the request so far."""
        return self._state.usage

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events for the client.

        Raises:
            NoEngine: no engine is left; once the stream has begun, an event says so instead.
            EngineRefused: the request is wrong.
        """
        has_begun = False
        try:
            async for chunk in self._chunks(_Leg("think")):
                has_begun = True
                yield _event(chunk)
        except NoEngine as error:
            if not has_begun:
                raise
            message = {"message": str(error), "type": "ServiceUnavailable", "code": 503}
            yield _event({"error": message})
            return
        except EngineRefused:
            raise
        except Exception as error:
            if not has_begun:
                raise
            logger.exception("a stream ended early: the router failed")
            text = f"the router failed: {type(error).__name__}; its log says where"
            yield _event({"error": {"message": text, "type": "InternalServerError", "code": 500}})
            return
        yield DONE

    async def rest(self, ticket: Json, holder: Engine) -> AsyncIterator[Json]:
        """The chunks of a request whose thought was served elsewhere.

        Args:
            ticket: of the request.
            holder: the engine that served its thought.

        Raises:
            NoEngine: no engine is left.
        """
        self._state.begin_leg()
        async for chunk in self._chunks(self._moved(ticket, holder)):
            yield chunk

    async def _chunks(self, leg: _Leg) -> AsyncIterator[Json]:
        while not self._state.is_ended:
            engine = await self._attempts.choose(leg.role, leg.holder)
            if leg.ticket is not None and engine.role != "answer":
                leg = self._answered_in_place(leg.ticket)
            self._state.begin_leg()
            try:
                async for chunk in self._served(engine, leg):
                    yield chunk
                leg = self._next_leg(engine) or leg
            except (EngineFailed, EngineRefused) as error:
                # An engine that began the request did not refuse it.
                if isinstance(error, EngineRefused) and not self._state.token_ids:
                    raise
                self._attempts.failed(engine, error)
                if self._is_complete():
                    break
                is_reached = isinstance(error, EngineRefused) or error.is_reached
                leg = self._resumed(leg, is_reached=is_reached)
        usage = self._state.usage_chunk()
        if usage is not None:
            yield usage

    async def _served(self, engine: Engine, leg: _Leg) -> AsyncIterator[Json]:
        """What the client gets of one leg."""
        async with aclosing(self._sent(engine, leg)) as chunks:
            async for chunk in chunks:
                try:
                    self._ticket = ticket_in(chunk) or self._ticket
                except ConfigError as error:
                    # The client gets what else is in the chunk.
                    shown = self._state.take(chunk, is_last_of_leg=True)
                    if shown is not None:
                        yield shown
                    raise EngineFailed(str(error), is_down=False) from error
                is_aborted = take_abort(chunk)
                shown = self._state.take(chunk, is_last_of_leg=self._ticket is not None)
                if shown is not None:
                    yield shown
                if is_aborted:
                    raise EngineFailed("it aborted the request", is_down=False)

    async def _sent(self, engine: Engine, leg: _Leg) -> AsyncGenerator[Json]:
        """The chunks of one engine; one that took a request over must send its first token soon."""
        body = self._attempts.first_body(engine) if leg.body is None else leg.body
        limit = None if leg.ended_at is None else self._services.answer_wait_s
        events = self._services.client.events(engine, self._path, _asked(body), self._headers)
        async with aclosing(events):
            while True:
                try:
                    may_leave = self._can_go_on(leg) and not self._attempts.is_last
                    chunk = await within(engine, anext(events), limit, may_leave=may_leave)
                except StopAsyncIteration:
                    return
                has_token = any(choice.get("token_ids") for choice in chunk.get("choices", ()))
                if limit is not None and has_token and leg.ended_at is not None:
                    self._services.metrics.moved("moved")
                    self._services.metrics.gap(time.monotonic() - leg.ended_at)
                    limit = None
                yield chunk

    def _is_complete(self) -> bool:
        """Whether a lost engine had sent all but the end of its stream."""
        return self._state.is_ended

    def _next_leg(self, engine: Engine) -> _Leg | None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            return self._moved(ticket, engine)
        if not self._state.is_ended:
            raise EngineFailed("its stream ended without a finish reason", is_down=False)
        return None

    def _moved(self, ticket: Json, holder: Engine) -> _Leg:
        self._state.continue_from(ticket)
        return _Leg(
            "answer", ingest(self._body, ticket), time.monotonic(), ticket, holder, is_handed=True
        )

    def _answered_in_place(self, ticket: Json) -> _Leg:
        """The rest of a request that was handed off, when no answer engine is left.

        A ticket is of no use to a think engine: the blocks may be its own. If they are, it need not
        keep them for a reader: all thoughts that end now would fill its cache with such blocks.
        """
        self._services.metrics.moved("answered_again")
        return _Leg("answer", releasing(self._rest(), ticket), is_handed=True)

    def _resumed(self, leg: _Leg, *, is_reached: bool) -> _Leg:
        """The rest of the request, for another engine.

        Args:
            leg: in which an engine failed.
            is_reached: whether that engine may have got the request, and with it a ticket.

        Raises:
            NoEngine: the client has a part that another engine cannot continue.
        """
        state = self._state
        self._services.metrics.moved("resumed" if leg.ended_at is None else "answered_again")
        self._ticket = None
        role: Role = "answer" if state.is_answering else "think"
        if self._is_unseen(leg):
            state.begin_again()
            return _Leg(role)
        if not self._can_go_on(leg):
            raise NoEngine(
                "the engine was lost, and no other one can continue this request: a tool call, a "
                "grammar, a stop string, several choices or media"
            )
        is_handed = leg.is_handed and not state.is_answering
        if is_handed or self._body.get("tools"):
            # A stop string or a tool call that has begun: the tokens came, and their text did not.
            state.forget_unshown()
        rest = self._rest()
        if leg.ticket is not None and not is_reached:
            rest = releasing(rest, leg.ticket)
        return _Leg(role, rest, holder=leg.holder, is_handed=leg.is_handed)

    def _rest(self) -> Json:
        """The request for an engine that has none of its KV cache."""
        state = self._state
        return resume(self._body, state.token_ids, state.num_output_tokens, state.num_tokens_left)

    def _is_unseen(self, leg: _Leg) -> bool:
        """Whether the client has nothing of the request yet: it can be sent from its beginning."""
        return leg.body is None and not self._state.has_text and not self._state.has_told

    def _can_go_on(self, leg: _Leg) -> bool:
        """Whether another engine can serve the rest of the request."""
        state, body = self._state, self._body
        if self._is_unseen(leg):
            return True
        # A stop string may hold text back.
        is_bound = body.get("stop") or (state.is_answering and has_grammar(body))
        is_handed = leg.is_handed and not state.is_answering
        is_bound = is_bound and not is_handed
        # Tokens without text have to be sampled again there, but the client has them.
        begins_again = body.get("tools") or (is_handed and (body.get("stop") or has_grammar(body)))
        is_bound = is_bound or (begins_again and state.has_told_unshown)
        return not state.has_tool_calls and not is_bound and self._attempts.may_move


def _asked(body: Json) -> Json:
    """The body for an engine: its chunks have token ids and reasoning, and the last one usage."""
    given = body.get("stream_options")
    if given is not None and not isinstance(given, dict):
        # The engine refuses it.
        return body
    options = {**(given or {}), "include_usage": True}
    options.pop("continuous_usage_stats", None)
    asked = {**body, "stream": True, "stream_options": options, "return_token_ids": True}
    asked.pop("include_reasoning", None)
    return asked


def _event(payload: Json) -> bytes:
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
