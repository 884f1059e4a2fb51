"""The router as an ASGI application."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final
from urllib.parse import quote

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from meridian_patch.errors import ConfigError
from meridian_patch.handoff.requests import cleaned, is_true
from meridian_patch.router.attempts import NoEngine, Services
from meridian_patch.router.engine import BROKEN, Engine
from meridian_patch.router.engine_client import (
    TIMEOUT,
    EngineClient,
    EngineFailed,
    EngineRefused,
    Headers,
    within,
)
from meridian_patch.router.hung import HUNG_AFTER_S
from meridian_patch.router.metrics import Metrics
from meridian_patch.router.pool import Pool
from meridian_patch.router.stream_relay import StreamRelay
from meridian_patch.router.whole_relay import WholeRelay

logger = logging.getLogger("meridian.route")

PATHS: Final = ("/v1/chat/completions", "/v1/completions")
"""Endpoints whose requests may be handed off; all others are passed to one engine."""

RETRY_AFTER_S: Final = 1
_LATER: Final = {"Retry-After": str(RETRY_AFTER_S)}

_GONE_POLL_S: Final = 0.5
# What servers note for a client that closed its connection; no client reads it.
_CLIENT_GONE: Final = 499

# Headers that belong to one connection, or that the router writes itself.
_OWN_HEADERS: Final = frozenset(
    b"host content-length content-encoding transfer-encoding connection keep-alive".split()
)
# Around a value they have no meaning; the server leaves them, and the HTTP client refuses them.
_BLANKS: Final = b" \t"


class _BodyError(Exception):
    """The client's request is no JSON object."""


class Router:
    """Endpoints of the router.

    Args:
        engines: those that think, and those that answer.
        answer_wait_s: seconds after which an answer engine that has sent nothing is given up.
        transport: takes the place of connections to engines.
        hung_after_s: seconds without a sign of life after which an engine hangs; 0: never.
        allowed_origins: of pages whose browsers may send requests; ``*``: of all.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        answer_wait_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        hung_after_s: float = HUNG_AFTER_S,
        allowed_origins: Sequence[str] = ("*",),
    ) -> None:
        self._allowed_origins = allowed_origins
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=128)
        # One client's cookies are not another's.
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        # Engines are addressed directly, whatever proxy the environment names.
        self._http = httpx.AsyncClient(
            limits=limits, trust_env=False, transport=transport, cookies=no_cookies
        )
        self.metrics = Metrics()
        self.pool = Pool(engines, self._http, hung_after_s)
        client = EngineClient(self._http)
        self._services = Services(self.pool, client, self.metrics, answer_wait_s)

    def app(self) -> Starlette:
        """The ASGI application."""
        both = [spelling for path in PATHS for spelling in (path, f"{path}/")]
        routes = [Route(path, self._generate, methods=["POST"]) for path in both]
        routes += [
            Route("/health", self._health),
            Route("/metrics", self._metrics_page),
            Route("/{path:path}", self._pass_on, methods=["GET", "POST"]),
        ]
        for_browsers = Middleware(
            CORSMiddleware,
            allow_origins=self._allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
        return Starlette(routes=routes, middleware=[for_browsers], lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self.pool.check_all()
        watcher = asyncio.create_task(self.pool.watch())
        try:
            yield
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            await self._http.aclose()

    async def _generate(self, request: Request) -> Response:
        response = await self._answer(request)
        self.metrics.request(request.url.path, response.status_code)
        return response

    async def _answer(self, request: Request) -> Response:
        try:
            body = cleaned(_json_object(await request.body()))
            return await _unless_gone(request, self._relayed(request, body))
        except _BodyError as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        except EngineRefused as refusal:
            is_busy = refusal.status == HTTPStatus.SERVICE_UNAVAILABLE
            headers = _LATER if is_busy else None
            return Response(refusal.body, refusal.status, headers, "application/json")
        except NoEngine as error:
            return _unavailable(str(error))
        except ConfigError as error:
            return _error(HTTPStatus.BAD_GATEWAY, str(error))

    async def _relayed(self, request: Request, body: dict[str, Any]) -> Response:
        where = request.url.path.rstrip("/"), body, _headers(request.headers.raw)
        if not is_true(body.get("stream")):
            return JSONResponse(await WholeRelay(self._services, *where).response())
        events = StreamRelay(self._services, *where).events()
        # The status is sent with the first event, so an error before it has its own.
        first = await anext(events)
        return _Held(_chain(first, events), events.aclose, media_type="text/event-stream")

    async def _pass_on(self, request: Request) -> Response:
        """Any other endpoint: one engine serves it, without a hand-off."""
        engine = self._any_engine()
        if engine is None:
            return _unavailable("no healthy engine is left for this request")
        try:
            url = _url_at(engine, request)
        except (httpx.InvalidURL, ValueError) as error:
            return _error(HTTPStatus.BAD_REQUEST, f"the request's address is invalid: {error}")
        try:
            content = _passed_on(await request.body())
        except _BodyError as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        outgoing = self._http.build_request(
            request.method,
            url,
            content=content,
            headers=_headers(request.headers.raw),
            timeout=TIMEOUT,
        )
        return await _unless_gone(request, self._passed(engine, outgoing))

    async def _passed(self, engine: Engine, outgoing: httpx.Request) -> Response:
        engine.num_requests += 1
        try:
            reply = await within(engine, self._http.send(outgoing, stream=True), may_leave=False)
        except BaseException as error:
            engine.num_requests -= 1
            if isinstance(error, httpx.LocalProtocolError):
                return _error(HTTPStatus.BAD_REQUEST, f"the request cannot be sent: {error}")
            if not isinstance(error, (*BROKEN, EngineFailed)):
                raise
            self.pool.suspect(engine, type(error).__name__)
            return _unavailable(f"the engine failed: {type(error).__name__}")

        async def release() -> None:
            engine.num_requests -= 1
            await reply.aclose()

        held = _Held(self._body_of(engine, reply), release, reply.status_code)
        held.raw_headers = [
            (name, value)
            for name, value in _headers(reply.headers.raw)
            # The router says itself which pages may read it.
            if not name.lower().startswith(b"access-control-")
        ]
        return held

    async def _body_of(self, engine: Engine, reply: httpx.Response) -> AsyncIterator[bytes]:
        """Its parts; an error breaks the client's connection, so that half is not taken for all."""
        parts = reply.aiter_bytes()
        try:
            while True:
                try:
                    part = await within(engine, anext(parts), may_leave=False)
                except StopAsyncIteration:
                    return
                yield part
        except (*BROKEN, EngineFailed) as error:
            self.pool.suspect(engine, f"{type(error).__name__} in its response")
            raise

    def _any_engine(self) -> Engine | None:
        """An engine that thinks, or else one that answers, which serves all that a client asks."""
        return self.pool.choose("think") or self.pool.choose("answer")

    async def _health(self, _: Request) -> Response:
        if self._any_engine() is None:
            return _unavailable("no engine is healthy")
        return Response()

    async def _metrics_page(self, _: Request) -> Response:
        page = self.metrics.page(self.pool.engines)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


class _Held(StreamingResponse):
    """A stream that gives back what it holds, also if it never begins.

    Starlette does not start the body for a client that is gone, and what was not started is not
    closed either.

    Args:
        body: of the response.
        release: called once, when the response has ended.
    """

    def __init__(
        self,
        body: AsyncIterator[bytes],
        release: Callable[[], Awaitable[None]],
        status: int = HTTPStatus.OK,
        media_type: str | None = None,
    ) -> None:
        super().__init__(body, status, media_type=media_type)
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._release()


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
        # What JSON does not have, such as NaN, is refused here rather than by an engine.
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _BodyError(f"the request's body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise _BodyError("the request's body is no JSON object")
    return body


def _passed_on(content: bytes) -> bytes:
    """A body without what only engines may tell each other; anything but JSON is left as it is.

    Raises:
        _BodyError: it is nested too deeply to be read.
    """
    try:
        body = json.loads(content)
        return json.dumps(cleaned(body)).encode() if isinstance(body, dict) else content
    except RecursionError as error:
        raise _BodyError("the request's body is nested too deeply") from error
    except ValueError:
        return content


async def _unless_gone(request: Request, reply: Coroutine[Any, Any, Response]) -> Response:
    """The reply, unless its client closes the connection while it waits for it."""
    task = asyncio.ensure_future(reply)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_GONE_POLL_S)
            # A reply that comes meanwhile holds a connection, which it gives back itself.
            if await request.is_disconnected() and not task.done():
                return Response(status_code=_CLIENT_GONE)
        return task.result()
    finally:
        task.cancel()


async def _chain(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for event in events:
            yield event
    except EngineRefused as refusal:
        yield b"data: " + refusal.body.replace(b"\n", b" ") + b"\n\n"


def _url_at(engine: Engine, request: Request) -> httpx.URL:
    """The request's address at an engine: path and query as the client wrote them."""
    target = request.scope.get("raw_path") or quote(request.url.path).encode()
    query = request.scope["query_string"]
    target += b"?" + query if query else b""
    return httpx.URL(engine.url).copy_with(raw_path=target)


def _headers(given: Headers) -> Headers:
    """Headers to pass on, in bytes: a value need not be text, and a name may come twice."""
    kept = [(name, value) for name, value in given if name.lower() not in _OWN_HEADERS]
    return [(name, value.strip(_BLANKS)) for name, value in kept]


def _error(status: HTTPStatus, message: str, **headers: str) -> JSONResponse:
    error: dict[str, Any] = {"message": message, "type": status.phrase, "code": status.value}
    return JSONResponse({"error": error}, status.value, headers=headers or None)


def _unavailable(message: str) -> JSONResponse:
    return _error(HTTPStatus.SERVICE_UNAVAILABLE, message, **_LATER)
