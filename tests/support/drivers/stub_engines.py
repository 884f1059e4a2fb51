"""Engines that play scripts, a router in front of them, and what its client sees."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from meridian_patch.handoff.ticket import FACTS, PROMPT_IDS
from meridian_patch.router.app import Router
from meridian_patch.router.command import engines_of

LAYOUT = {"model": "m", "weights": "w", "block_size": 32, "cache_dtype": "auto", "dtype": "float32"}
TICKET = {
    "do_remote_prefill": True,
    "remote_engine_id": "one",
    PROMPT_IDS: [1, 2, 10, 11],
    FACTS: {
        "num_prompt_tokens": 2,
        "num_output_tokens": 2,
        "max_tokens_left": 98,
        "layout": LAYOUT,
    },
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "q"}], "stream": True}


def chunk(token: int | None = None, **choice) -> dict:
    ids = [] if token is None else [token]
    return {"id": "x", "choices": [{"index": 0, "delta": {}, "token_ids": ids} | choice]}


THOUGHT = [
    {**chunk(delta={"role": "assistant", "content": ""}), PROMPT_IDS: [1, 2]},
    chunk(10, delta={"reasoning": "hm"}),
    chunk(11),
]
LEAVES = [{**chunk(finish_reason="length"), "kv_transfer_params": TICKET}]
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
ANSWER = [
    {**chunk(delta={"role": "assistant", "content": ""}), PROMPT_IDS: [1, 2, 10, 11]},
    chunk(12, delta={"content": "6"}),
    chunk(13, delta={"content": "."}, finish_reason="stop"),
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}},
]


class StubEngine:
    """Answers each request with the next of its scripts; remembers what it was sent.

    A script is a whole response, or a list of chunks, ``None`` among them for a broken connection.
    """

    def __init__(self, *scripts: dict | list[dict | None], status: int = 200) -> None:
        self.scripts = list(scripts)
        self.status = status
        self.bodies: list[dict] = []
        self.is_healthy = True
        self.app = Starlette(
            routes=[
                Route("/health", lambda _: Response(status_code=200 if self.is_healthy else 500)),
                Route(CHAT, self._chat, methods=["POST"]),
                Route(COMPLETIONS, self._chat, methods=["POST"]),
            ]
        )

    async def _chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if self.status != 200:
            return JSONResponse({"error": {"message": "no"}}, self.status)
        script = self.scripts.pop(0)
        if isinstance(script, dict):
            return JSONResponse(script)
        return StreamingResponse(self._events(script))

    async def _events(self, script: list[dict | None]) -> AsyncIterator[str]:
        for each in script:
            if each is None:
                return
            yield f"data: {json.dumps(each)}\n\n"
        yield "data: [DONE]\n\n"


class Refuses(StubEngine):
    """Was healthy, and takes no connection any more."""

    async def _chat(self, request: Request) -> Response:
        raise httpx.ConnectError("refused")


class ByHost(httpx.AsyncBaseTransport):
    """Routes requests to the stub with the host's name."""

    def __init__(self, stubs: dict[str, StubEngine]) -> None:
        self._transports = {name: httpx.ASGITransport(stub.app) for name, stub in stubs.items()}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host not in self._transports:
            raise httpx.ConnectError("refused")
        return await self._transports[request.url.host].handle_async_request(request)


@asynccontextmanager
async def routed(think: list[str], answer: list[str], stubs: dict[str, StubEngine], **options):
    """A client of a router whose engines are these stubs."""
    engines = engines_of([f"http://{n}" for n in think], [f"http://{n}" for n in answer])
    router = Router(engines, answer_wait_s=5, transport=ByHost(stubs), **options)
    app = router.app()
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield client, router


def post(
    stubs: dict[str, StubEngine], body: dict = BODY, answer: tuple[str, ...] = ("b",)
) -> tuple[httpx.Response, Router]:
    """One request to a router with a think engine ``a``, and answer engines."""

    async def run() -> tuple[httpx.Response, Router]:
        think = [name for name in stubs if name not in answer] or ["a"]
        async with routed(think, list(answer), stubs) as (client, router):
            return await client.post(CHAT, json=body), router

    return asyncio.run(run())


def content(response: httpx.Response) -> tuple[str, str]:
    """The thought and the answer that a client reads."""
    chunks = events(response)
    deltas = [c["delta"] for e in chunks for c in e.get("choices", ())]
    return (
        "".join(d.get("reasoning") or "" for d in deltas),
        "".join(d.get("content") or "" for d in deltas),
    )


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def moved(router: Router) -> dict[str, float]:
    page = router.metrics.page(router.pool.engines).decode()
    lines = [line for line in page.splitlines() if "handoffs_total{" in line]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}
