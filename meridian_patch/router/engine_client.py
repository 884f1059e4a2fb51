"""Sends one request to one engine, and tells an engine's failure from its refusal."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar

import httpx

from meridian_patch.router.engine import BROKEN, Engine

Json = dict[str, Any]
Headers = list[tuple[bytes, bytes]]
Reply = TypeVar("Reply")

_DONE: Final = b"[DONE]"
TIMEOUT: Final = httpx.Timeout(None, connect=2.0)
"""Of requests to engines: one that is connected is given up by its health checks alone.

A connection is given up before an answer engine's time is over, so that it is known that the engine
got no ticket.
"""

# What a proxy says whose server cannot serve any request now.
_DOWN: Final = frozenset((HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT))
# What vLLM says when its EngineCore has died, and when too much waits there for this request. Its
# health check tells whether it can serve others.
_MAY_BE_DOWN: Final = frozenset((HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE))


class EngineRefused(Exception):  # noqa: N818 - the name is what happened
    """An engine refused a request: another one would refuse it too.

    Attributes:
        status: HTTP status of the refusal.
        body: its content.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body


class EngineFailed(Exception):  # noqa: N818 - the name is what happened
    """An engine did not answer, broke off, or reported an error of its own.

    Attributes:
        is_down: whether it would fail other requests, too.
        refusal: its error, for the client if all engines fail alike; None if it sent none.
        is_reached: whether the engine may have got the request.
    """

    def __init__(
        self,
        message: str,
        *,
        is_down: bool = True,
        refusal: EngineRefused | None = None,
        is_reached: bool = True,
    ) -> None:
        super().__init__(message)
        self.is_down = is_down
        self.refusal = refusal
        self.is_reached = is_reached


async def within(
    engine: Engine,
    reply: Awaitable[Reply],
    limit_s: float | None = None,
    *,
    may_leave: bool = True,
) -> Reply:
    """Wait for a reply of an engine until it is lost, or hangs.

    Args:
        engine: from which the reply comes.
        reply: to wait for.
        limit_s: seconds to wait at most; None: as long as the engine answers its health checks.
        may_leave: whether another engine can serve the request: otherwise one that hangs is
            waited for, too.

    Raises:
        EngineFailed: the engine is lost or hangs, or the time is over.
    """
    try:
        async with asyncio.timeout(limit_s) as wait:
            engine.begin_wait(wait, may_leave=may_leave)
            try:
                return await reply
            finally:
                engine.end_wait(wait)
    except TimeoutError as error:
        # One that is slow to begin may still serve others.
        raise EngineFailed("it sent nothing for too long", is_down=limit_s is None) from error


def take_abort(reply: Json) -> bool:
    """Whether an engine aborted the request: it drains, pauses or ends. Takes the reason out."""
    aborted = [each for each in reply.get("choices", ()) if each.get("finish_reason") == "abort"]
    for choice in aborted:
        choice["finish_reason"] = None
    return bool(aborted)


class EngineClient:
    """Requests to engines.

    Args:
        client: keeps the connections.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def whole(self, engine: Engine, path: str, body: Json, headers: Headers) -> Json:
        """Send a request and return the whole response.

        Raises:
            EngineFailed: no response, or an error of the engine.
            EngineRefused: the request is wrong.
        """
        async with self._open(engine, path, body, headers) as reply:
            try:
                content = await reply.aread()
                engine.heard()
                return _object(content)
            except (httpx.HTTPError, ValueError) as error:
                raise EngineFailed(f"{type(error).__name__} in its response") from error

    async def events(
        self, engine: Engine, path: str, body: Json, headers: Headers
    ) -> AsyncGenerator[Json]:
        """Send a request and yield the chunks of its stream.

        Raises:
            EngineFailed: no response, an error of the engine, or a stream without its end.
            EngineRefused: the request is wrong.
        """
        async with self._open(engine, path, body, headers) as reply:
            try:
                async with aclosing(_lines(reply)) as lines:
                    async for line in lines:
                        text = line.removeprefix(b"data:").strip()
                        if not line.startswith(b"data:") or not text:
                            continue
                        if text == _DONE:
                            return
                        engine.heard()
                        yield _chunk(text)
            except httpx.HTTPError as error:
                raise EngineFailed(f"{type(error).__name__} in its stream") from error
        raise EngineFailed("its stream ended without [DONE]")

    @asynccontextmanager
    async def _open(
        self, engine: Engine, path: str, body: Json, headers: Headers
    ) -> AsyncIterator[httpx.Response]:
        kept = [(name, value) for name, value in headers if name.lower() != b"content-type"]
        request = self._client.build_request(
            "POST",
            f"{engine.url}{path}",
            content=json.dumps(body, separators=(",", ":")).encode(),
            headers=[*kept, (b"content-type", b"application/json")],
            timeout=TIMEOUT,
        )
        engine.num_requests += 1
        try:
            try:
                reply = await self._client.send(request, stream=True)
            except httpx.LocalProtocolError as error:
                # What the client sent cannot be sent on, which is no engine's fault.
                told = {"error": {"message": f"the request cannot be sent: {error}", "code": 400}}
                refusal = EngineRefused(HTTPStatus.BAD_REQUEST, json.dumps(told).encode())
                raise EngineFailed(
                    "LocalProtocolError", is_down=False, refusal=refusal, is_reached=False
                ) from error
            except BROKEN as error:
                is_reached = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                raise EngineFailed(type(error).__name__, is_reached=is_reached) from error
            try:
                if reply.status_code in _DOWN:
                    raise EngineFailed(f"HTTP {reply.status_code}")
                if reply.status_code >= HTTPStatus.BAD_REQUEST:
                    raise await _error_of(reply)
                yield reply
            finally:
                await reply.aclose()
        finally:
            engine.num_requests -= 1


async def _error_of(reply: httpx.Response) -> EngineFailed | EngineRefused:
    try:
        refusal = EngineRefused(reply.status_code, await reply.aread())
    except httpx.HTTPError as error:
        return EngineFailed(f"{type(error).__name__} in its response")
    if refusal.status in _MAY_BE_DOWN:
        return EngineFailed(f"HTTP {refusal.status}", is_down=False, refusal=refusal)
    return refusal


async def _lines(reply: httpx.Response) -> AsyncGenerator[bytes]:
    """The lines of a stream, without their ends.

    Not the client's own: it also cuts at U+2028 and others, which vLLM writes within its JSON.
    """
    rest = b""
    async for part in reply.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    yield rest


def _object(content: bytes) -> Json:
    found = json.loads(content.decode())
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one error for all that it can be
    return found


def _chunk(text: bytes) -> Json:
    try:
        chunk = _object(text)
    except ValueError as reason:
        # Its stream goes on, so the engine may still serve others.
        raise EngineFailed(f"an event is no JSON object: {reason}", is_down=False) from reason
    if "error" not in chunk:
        return chunk
    error = chunk["error"]
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and code < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise EngineRefused(code, text)
    raise EngineFailed(f"error {code} in its stream", is_down=False)
