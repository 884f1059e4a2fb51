"""The router and engines that answer with errors: HTTP 500 of a dead one, 503 of a busy one."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from meridian_patch.router.app import Router
from meridian_patch.router.attempts import _MOST_FAILURES
from meridian_patch.router.command import engines_of

CHAT = "/v1/chat/completions"
EVENT = (
    '{"id": "x", "choices": [{"index": 0, "delta": {"content": "6"}, '
    '"token_ids": [12], "finish_reason": "stop"}]}'
)


class Stub:
    """An engine whose requests are answered with one status.

    Args:
        status: of its replies to requests.
        health: of its health checks.
    """

    def __init__(self, status: int = 200, health: int = 200) -> None:
        self.status, self.health = status, health
        self.num_requests = self.num_checks = 0

    def reply(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path in {"/health", "/metrics"}:
            self.num_checks += path == "/health"
            return httpx.Response(self.health)
        self.num_requests += 1
        if self.status != 200:
            said = {"error": {"message": f"says {request.url.host}", "code": self.status}}
            return httpx.Response(self.status, json=said)
        if b'"stream":true' in request.content:
            return httpx.Response(200, text=f"data: {EVENT}\n\ndata: [DONE]\n\n")
        return httpx.Response(200, json={"choices": []})


@asynccontextmanager
async def routed(stubs: dict[str, Stub]):
    """A client of a router whose think engines are these; the first one is asked first."""

    def reply(request: httpx.Request) -> httpx.Response:
        return stubs[request.url.host].reply(request)

    engines = engines_of([f"http://{name}" for name in stubs], [])
    router = Router(engines, answer_wait_s=5, transport=httpx.MockTransport(reply))
    app = router.app()
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield client, router


def ask(stubs: dict[str, Stub], stream: bool = False) -> tuple[httpx.Response, list[bool]]:
    """One request: what its client gets, and which engines are healthy a little later."""

    async def run() -> tuple[httpx.Response, list[bool]]:
        async with routed(stubs) as (client, router):
            await asyncio.sleep(0.25)
            response = await client.post(CHAT, json={"messages": [], "stream": stream})
            await asyncio.sleep(0.1)
            return response, [engine.is_healthy for engine in router.pool.engines]

    return asyncio.run(run())


@pytest.mark.parametrize("status", (500, 503))
@pytest.mark.parametrize("stream", (True, False), ids=("stream", "whole"))
def test_another_engine_serves_what_one_fails(status: int, stream: bool) -> None:
    stubs = {"a": Stub(status), "c": Stub()}
    response, healthy = ask(stubs, stream)
    assert response.status_code == 200
    assert [stub.num_requests for stub in stubs.values()] == [1, 1]
    assert healthy == [True, True], "its health check decides"
    assert stubs["a"].num_checks == 2, "it is checked at once"


@pytest.mark.parametrize("status", (500, 503))
@pytest.mark.parametrize("stream", (True, False), ids=("stream", "whole"))
def test_an_error_of_all_engines_is_the_clients(status: int, stream: bool) -> None:
    stubs = {"a": Stub(status), "c": Stub(status)}
    response, healthy = ask(stubs, stream)
    assert response.status_code == status
    assert response.json()["error"]["message"] == "says c"
    assert response.headers.get("Retry-After") == ("1" if status == 503 else None)
    assert [stub.num_requests for stub in stubs.values()] == [1, 1]
    assert healthy == [True, True]


def test_an_engine_that_is_down_is_found_at_once() -> None:
    class Dies(Stub):
        def reply(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == CHAT:
                self.health = 503
            return super().reply(request)

    response, healthy = ask({"a": Dies(500), "c": Stub()})
    assert response.status_code == 200
    assert healthy == [False, True]


def test_a_request_that_engines_die_of_does_not_reach_all() -> None:
    stubs = {name: Stub(500) for name in "abcdef"}
    response, _ = ask(stubs)
    assert response.status_code == 500
    assert sum(stub.num_requests for stub in stubs.values()) == _MOST_FAILURES


def test_a_free_engine_is_found_among_busy_ones() -> None:
    stubs = {name: Stub(503) for name in "abcdef"} | {"g": Stub()}
    assert ask(stubs)[0].status_code == 200


def test_busy_engines_are_not_checked_with_each_reply() -> None:
    stub = Stub(503)

    async def run() -> None:
        async with routed({"a": stub}) as (client, _):
            await asyncio.sleep(0.25)
            for _ in range(30):
                assert (await client.post(CHAT, json={"messages": []})).status_code == 503
                await asyncio.sleep(0)

    asyncio.run(run())
    assert stub.num_requests == 30
    assert stub.num_checks < 5
