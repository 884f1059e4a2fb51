"""The router and clients that are gone, and a service whose think engines are."""

import asyncio
import json

import httpx
import pytest

from meridian_patch.router.app import Router
from meridian_patch.router.command import engines_of

CHAT = "/v1/chat/completions"
CHUNK = {"id": "x", "choices": [{"index": 0, "delta": {"content": "6"}, "token_ids": [12]}]}


class Body(httpx.AsyncByteStream):
    """A body that never ends after its first part; remembers whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    async def __aiter__(self):
        yield f"data: {json.dumps(CHUNK)}\n\n".encode()
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True


class Slow(httpx.AsyncBaseTransport):
    """An engine that is healthy, and answers everything else after a while."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.bodies: list[Body] = []
        self.was_cancelled = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path in {"/health", "/metrics"}:
            return httpx.Response(200)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        self.bodies.append(Body())
        return httpx.Response(200, stream=self.bodies[-1])


def ask_and_leave(path: str, delay_s: float):
    """Send one request whose client is gone as soon as its body is read, as uvicorn tells it.

    Returns:
        The engine, its transport, and what was sent to the client.
    """
    (engine,) = engines_of(["http://a"], [])
    transport, sent = Slow(delay_s), []

    async def run() -> None:
        app = Router([engine], answer_wait_s=5, transport=transport).app()
        body = json.dumps({"messages": [], "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message) -> None:
            # As while a connection takes no more bytes.
            await asyncio.sleep(0.01)
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [],
        }
        async with app.router.lifespan_context(app):
            await asyncio.wait_for(app(scope, receive, send), 5)

    asyncio.run(run())
    return engine, transport, sent


@pytest.mark.parametrize("path", ["/v1/responses", CHAT])
def test_a_client_that_leaves_before_its_response_begins_leaves_nothing(path):
    """Its engine has one request less, and the connection to it is closed."""
    engine, transport, _ = ask_and_leave(path, delay_s=0)
    assert engine.num_requests == 0
    assert all(body.is_closed for body in transport.bodies)


@pytest.mark.parametrize("path", ["/v1/responses", CHAT])
def test_what_no_client_waits_for_ends_at_the_engine(path):
    """It does not go on for as long as the engine takes."""
    engine, transport, _ = ask_and_leave(path, delay_s=60)
    assert transport.was_cancelled
    assert engine.num_requests == 0


def test_answer_engines_alone_keep_the_service_up():
    """They serve what would think elsewhere, so a balancer must go on sending requests."""
    engines = engines_of(["http://a"], ["http://b"])

    class Left(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.host == "a":
                raise httpx.ConnectError("refused")
            return httpx.Response(200, json={"data": []})

    async def run() -> tuple[int, int]:
        app = Router(engines, answer_wait_s=5, transport=Left()).app()
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://r") as client:
                paths = ("/health", "/v1/models")
                return tuple([(await client.get(path)).status_code for path in paths])

    assert asyncio.run(run()) == (200, 200)
