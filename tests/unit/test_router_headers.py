"""What of a request's and a response's headers passes the router, and what must fail no engine."""

import asyncio
import json

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from stub_engines import ANSWER, BODY, CHAT, StubEngine, routed

NAMES = ("authorization", "x-user", "x-forwarded-for", "cookie")


class Notes(StubEngine):
    """Remembers headers, and answers with its own."""

    def __init__(self, *scripts, raw_headers: list[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(*scripts)
        self.seen: list[dict[str, list[bytes]]] = []
        self._raw_headers = list(raw_headers)
        self.app.routes.append(Route("/v1/{name}", self._other, methods=["GET", "POST"]))

    def _note(self, request: Request) -> None:
        raw = [(name.decode(), value) for name, value in request.headers.raw]
        self.seen.append({n: [v for name, v in raw if name == n] for n in NAMES})

    async def _chat(self, request: Request) -> Response:
        self._note(request)
        return await super()._chat(request)

    async def _other(self, request: Request) -> Response:
        self._note(request)
        self.bodies.append(await request.body())
        response = JSONResponse({})
        response.raw_headers += self._raw_headers
        return response


def through(engine: StubEngine, *requests: tuple[str, str, dict]) -> tuple[list, list]:
    """The responses of a router with this engine, and its engines' state."""

    async def run():
        async with routed(["a"], [], {"a": engine}) as (client, router):
            replies = [await client.request(method, url, **more) for method, url, more in requests]
            return replies, router.pool.engines

    return asyncio.run(run())


@pytest.mark.parametrize(
    "value",
    (b"Bearer ", b"Bearer \t", b"Jos\xe9", "é".encode()),
    ids=("blank", "tab", "latin", "utf8"),
)
def test_a_value_that_clients_send_reaches_the_engine(value: bytes) -> None:
    """Without the blanks around it, which the HTTP client would refuse."""
    headers = [(b"authorization", value), (b"x-forwarded-for", b"1"), (b"x-forwarded-for", b"2")]
    engine = Notes(ANSWER)
    asked = [("POST", CHAT, {"json": BODY, "headers": headers})]
    asked += [("GET", "/v1/models", {"headers": headers})]
    replies, engines = through(engine, *asked)
    assert [each.status_code for each in replies] == [200, 200]
    for seen in engine.seen:
        assert seen["authorization"] == [value.strip()]
        assert seen["x-forwarded-for"] == [b"1", b"2"]
    assert engines[0].is_healthy


@pytest.mark.parametrize("method", ("POST", "GET"))
def test_what_cannot_be_sent_is_the_clients_fault(method: str) -> None:
    """HTTP 400, and every engine stays."""

    class CannotBeSent(Notes):
        async def _chat(self, request: Request) -> Response:
            raise httpx.LocalProtocolError("illegal header value")

        _other = _chat

    path = CHAT if method == "POST" else "/v1/models"
    (reply,), engines = through(CannotBeSent(), (method, path, {"json": BODY}))
    assert reply.status_code == 400
    assert "cannot be sent" in reply.json()["error"]["message"]
    assert engines[0].is_healthy
    assert engines[0].num_requests == 0


def test_one_clients_cookies_are_not_anothers() -> None:
    """Nor are two of them joined into one, and a value need not be text."""
    given = [(b"set-cookie", b"session=one"), (b"set-cookie", b"b=2"), (b"x-a", "→".encode())]
    engine = Notes(raw_headers=given)
    second = {"headers": {"cookie": "own=1"}}
    replies, engines = through(engine, ("GET", "/v1/models", {}), ("GET", "/v1/models", second))
    assert engine.seen[0]["cookie"] == []
    assert [each for each in replies[0].headers.raw if each in given] == given
    assert engine.seen[1]["cookie"] == [b"own=1"] or b"session" not in engine.seen[1]["cookie"][0]
    assert engines[0].num_requests == 0


def test_a_body_that_is_nested_too_deeply_is_not_passed_on() -> None:
    """It could hold what only engines may tell each other."""
    engine = Notes()
    nested = "[" * 5000 + "]" * 5000
    body = f'{{"a": {nested}, "kv_transfer_params": {{}}}}'
    (reply,), _ = through(engine, ("POST", "/v1/messages", {"content": body}))
    assert reply.status_code == 400
    assert not engine.bodies
    (reply,), _ = through(engine, ("POST", "/v1/messages", {"content": b"\x00no json"}))
    assert reply.status_code == 200
    assert engine.bodies == [b"\x00no json"]
    assert json.loads(reply.text) == {}
