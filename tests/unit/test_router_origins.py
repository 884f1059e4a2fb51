"""Requests from pages in browsers: which pages may read what the router says."""

import asyncio

import httpx
import pytest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from stub_engines import ANSWER, BODY, CHAT, StubEngine, routed

from meridian_patch.cli import main

PAGE = "https://chat.example.com"
ALLOWED = "access-control-allow-origin"


class Open(StubEngine):
    """Lets all pages read it, as vLLM does."""

    def __init__(self, *scripts) -> None:
        super().__init__(*scripts)
        self.app.routes.append(Route("/v1/models", self._models))

    async def _models(self, _) -> Response:
        return JSONResponse({}, headers={ALLOWED: "*"})


def replies(origin: str, **options) -> list[httpx.Response]:
    """To a browser's question before a request, the request, and one that is passed on."""
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}

    async def run() -> list[httpx.Response]:
        async with routed(["a"], [], {"a": Open(ANSWER)}, **options) as (client, _):
            return [
                await client.options(CHAT, headers=asks),
                await client.post(CHAT, json=BODY, headers={"Origin": origin}),
                await client.get("/v1/models", headers={"Origin": origin}),
            ]

    return asyncio.run(run())


def allowed(reply: httpx.Response) -> list[str]:
    return reply.headers.get_list(ALLOWED)


def test_all_pages_may_ask_as_they_may_ask_one_engine():
    got = replies(PAGE)
    assert [reply.status_code for reply in got] == [200, 200, 200]
    assert [allowed(reply) for reply in got] == [["*"]] * 3


@pytest.mark.parametrize("origin", (PAGE, "https://elsewhere.example.com"))
def test_only_named_pages_may_ask(origin: str):
    """An engine behind the router may allow more, which reaches no page."""
    got = replies(origin, allowed_origins=[PAGE])
    expected = [[PAGE]] * 3 if origin == PAGE else [[]] * 3
    assert [allowed(reply) for reply in got] == expected


@pytest.mark.parametrize("value", ("https://chat.example.com", '"*"', "[1]", "[", "{}"))
def test_a_wrong_list_is_refused(value: str, capsys):
    with pytest.raises(SystemExit):
        main(["route", "--think", "http://a", "--allowed-origins", value])
    said = capsys.readouterr().err
    assert f"--allowed-origins: is {value!r}, expected a JSON list of origins" in said
