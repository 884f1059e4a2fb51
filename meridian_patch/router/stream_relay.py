"""Serves a streamed request: it thinks on one engine, answers on another, and survives a loss."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from meridian_patch.handoff.requests import ingest, resume, ticket_in
from meridian_patch.router.attempts import Attempts, NoEngine, Services
from meridian_patch.router.engine_client import EngineFailed, EngineRefused
from meridian_patch.router.pool import Engine, Role
from meridian_patch.router.stream_state import StreamState

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class _Leg:
    """What one engine is to serve of the request."""

    role: Role
    body: Json
    # When its thought ended elsewhere; None for a request that was not handed off.
    ended_at: float | None = None


class StreamRelay:
    """Serves one request.

    Args:
        services: what all requests share.
        path: of the endpoint.
        body: the request as the client sent it.
        headers: to pass on.
    """

    def __init__(self, services: Services, path: str, body: Json, headers: dict[str, str]) -> None:
        self._services = services
        self._path = path
        self._body = body
        self._headers = headers
        self._attempts = Attempts(services.pool, body)
        self._state = StreamState(body)
        self._ticket: Json | None = None

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events for the client.

        Raises:
            NoEngine: no engine is left; once the stream has begun, an event says so instead.
            EngineRefused: the request is wrong.
        """
        has_begun = False
        try:
            async for chunk in self._chunks():
                has_begun = True
                yield _event(chunk)
        except NoEngine as error:
            if not has_begun:
                raise
            message = {"message": str(error), "type": "ServiceUnavailable", "code": 503}
            yield _event({"error": message})
            return
        yield DONE

    async def _chunks(self) -> AsyncIterator[Json]:
        leg = _Leg("think", _streamed(self._attempts.first_body()))
        while not self._state.is_ended:
            engine = self._attempts.choose(leg.role)
            try:
                async for chunk in self._served(engine, leg):
                    yield chunk
                leg = self._next_leg() or leg
            except (EngineFailed, EngineRefused) as error:
                # An engine that began the request did not refuse it.
                if isinstance(error, EngineRefused) and not self._state.token_ids:
                    raise
                self._attempts.failed(engine, error)
                leg = self._resumed(leg)
        usage = self._state.usage_chunk()
        if usage is not None:
            yield usage

    async def _served(self, engine: Engine, leg: _Leg) -> AsyncIterator[Json]:
        """What the client gets of one leg."""
        async with aclosing(self._sent(engine, leg)) as chunks:
            async for chunk in chunks:
                self._ticket = ticket_in(chunk) or self._ticket
                shown = self._state.take(chunk, is_last_of_leg=self._ticket is not None)
                if shown is not None:
                    yield shown

    async def _sent(self, engine: Engine, leg: _Leg) -> AsyncGenerator[Json]:
        """The chunks of one engine; one that took a request over must send its first token soon."""
        limit = None if leg.ended_at is None else self._services.answer_wait_s
        client = self._services.client
        async with aclosing(client.events(engine, self._path, leg.body, self._headers)) as events:
            while True:
                try:
                    chunk = await asyncio.wait_for(anext(events), limit)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    raise EngineFailed(f"it sent no token for {limit:g} s") from error
                has_token = any(choice.get("token_ids") for choice in chunk.get("choices", ()))
                if limit is not None and has_token and leg.ended_at is not None:
                    self._services.metrics.moved("moved")
                    self._services.metrics.gap(time.monotonic() - leg.ended_at)
                    limit = None
                yield chunk

    def _next_leg(self) -> _Leg | None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            return _Leg("answer", _streamed(ingest(self._body, ticket)), time.monotonic())
        if not self._state.is_ended:
            raise EngineFailed("its stream ended without a finish reason")
        return None

    def _resumed(self, leg: _Leg) -> _Leg:
        """The rest of the request, for another engine.

        Raises:
            NoEngine: the client has a part that another engine cannot continue.
        """
        state = self._state
        held_back = state.is_answering and self._body.get("stop")
        if state.has_tool_calls or held_back:
            raise NoEngine(
                "the engine was lost within a tool call, or within a text that a stop string may "
                "hold back, and no other engine can continue it"
            )
        self._services.metrics.moved("resumed" if leg.ended_at is None else "answered_again")
        self._ticket = None
        role: Role = "answer" if state.is_answering else "think"
        if not state.token_ids:
            return _Leg(role, leg.body)
        return _Leg(role, _streamed(resume(self._body, state.token_ids, state.num_output_tokens)))


def _streamed(body: Json) -> Json:
    """The body for an engine: its chunks have token ids, and the last one has the usage."""
    options = {**(body.get("stream_options") or {}), "include_usage": True}
    options.pop("continuous_usage_stats", None)
    return {**body, "stream": True, "stream_options": options, "return_token_ids": True}


def _event(payload: Json) -> bytes:
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
