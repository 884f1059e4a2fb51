"""Endpoints that the router passes on: addresses, and engines that break off or are lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from meridian_patch.router import pool
from meridian_patch.router.app import Router
from meridian_patch.router.command import engines_of


class Cut(httpx.AsyncByteStream):
    """A body that breaks off, or never ends."""

    def __init__(self, breaks: bool) -> None:
        self._breaks = breaks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'{"output": "half of'
        if self._breaks:
            raise httpx.ReadError("reset")
        await asyncio.Event().wait()


class One(httpx.AsyncBaseTransport):
    """An engine that is healthy until it is asked.

    Args:
        stays: whether it is healthy then, too.
        reply: to what it is asked; None: never one.
    """

    def __init__(self, stays: bool, reply: Callable[[], httpx.Response] | None) -> None:
        self._stays, self._reply = stays, reply
        self.asked: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path in {"/health", "/metrics"}:
            if self.asked and not self._stays:
                raise httpx.ConnectTimeout("no route")
            return httpx.Response(200)
        self.asked.append(request)
        if self._reply is None:
            await asyncio.Event().wait()
        return self._reply()


@asynccontextmanager
async def routed(transport: One):
    engines = engines_of(["http://a"], [])
    app = Router(engines, answer_wait_s=5, transport=transport).app()
    async with app.router.lifespan_context(app):
        inner = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=inner, base_url="http://router") as client:
            yield client, engines[0]


def get(transport: One, path: str = "/v1/responses"):
    async def run() -> httpx.Response:
        async with routed(transport) as (client, engine):
            try:
                async with asyncio.timeout(3):
                    return await client.get(path)
            finally:
                assert engine.num_requests == 0

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(pool, "POLL_S", 0.03)


@pytest.mark.parametrize("breaks", (True, False), ids=("breaks off", "is lost"))
def test_half_a_body_is_no_whole_response(breaks: bool) -> None:
    one = One(stays=breaks, reply=lambda: httpx.Response(200, stream=Cut(breaks)))
    with pytest.raises(Exception, match=r"reset|too long"):
        get(one)


def test_an_engine_that_is_lost_before_it_replies_is_given_up() -> None:
    one = One(stays=False, reply=None)
    response = get(one)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert one.asked[0].extensions["timeout"]["connect"]


@pytest.mark.parametrize(
    "target",
    (
        b"/wake_up?tags=weights&tags=kv_cache",
        b"/v1/models/a%2Fb",
        b"/v1/models/%01",
        b"/v1/models/a%3Fb?q=%26",
    ),
)
def test_addresses_reach_the_engine_as_they_are(target: bytes) -> None:
    one = One(stays=True, reply=lambda: httpx.Response(200))
    assert get(one, target.decode()).status_code == 200
    assert one.asked[0].url.raw_path == target


def test_an_address_that_is_none_is_refused() -> None:
    """As servers pass it on: a byte that no address has."""
    one, sent = One(stays=True, reply=lambda: httpx.Response(200)), []

    async def run() -> None:
        app = Router(engines_of(["http://a"], []), answer_wait_s=5, transport=one).app()

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/x", "raw_path": b"/\xff"}
        scope |= {"query_string": b"", "headers": [], "asgi": {"version": "3.0"}}
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 400
    assert b"address" in sent[1]["body"]
