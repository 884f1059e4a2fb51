"""Streams of the router that meet what no engine should send."""

import asyncio
import json

import httpx

from meridian_patch.handoff.ticket import FACTS, PROMPT_IDS
from meridian_patch.router.app import Router
from meridian_patch.router.command import engines_of

LAYOUT = {"model": "m", "weights": "w", "block_size": 32, "cache_dtype": "auto", "dtype": "float32"}
FACTS_SENT = {
    "num_prompt_tokens": 2,
    "num_output_tokens": 2,
    "max_tokens_left": 98,
    "layout": LAYOUT,
}


def chunk(token: int | None, text: str | None = None, **choice) -> dict:
    ids = [] if token is None else [token]
    return {
        "id": "x",
        "choices": [{"index": 0, "delta": {"content": text}, "token_ids": ids} | choice],
    }


THOUGHT = [{**chunk(10, "hm"), PROMPT_IDS: [1, 2]}, chunk(11)]
ANSWER = [chunk(12, "6"), chunk(13, ".", finish_reason="stop")]


class Engines(httpx.AsyncBaseTransport):
    """The think engine ``a`` ends with a ticket, and any other answers; remembers what it got."""

    def __init__(self, ticket: dict) -> None:
        self.thought = [*THOUGHT, {**chunk(None, finish_reason="length")}]
        self.thought[-1]["kv_transfer_params"] = ticket
        self.answered: list[dict] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path in {"/health", "/metrics"}:
            return httpx.Response(200)
        if request.url.host == "a":
            script = self.thought
        else:
            self.answered.append(json.loads(request.content))
            script = ANSWER
        lines = [f"data: {json.dumps(each)}\n\n" for each in script]
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def events(engines: Engines) -> list[dict]:
    """What a client of a router with these engines gets."""

    async def run() -> httpx.Response:
        router = Router(engines_of(["http://a"], ["http://b"]), 5, transport=engines)
        app = router.app()
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://r") as client,
        ):
            body = {"messages": [{"role": "user", "content": "q"}], "stream": True}
            return await client.post("/v1/chat/completions", json=body)

    lines = [line.removeprefix("data: ") for line in asyncio.run(run()).text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_ticket_that_does_not_fit_is_answered_from_the_tokens() -> None:
    """As one of another version of the package."""
    engines = Engines({PROMPT_IDS: [1, 2, 10, 11], FACTS: {**FACTS_SENT, "new": 1}})
    deltas = [choice["delta"] for each in events(engines) for choice in each["choices"]]
    assert "".join(delta["content"] or "" for delta in deltas) == "hm6."
    assert engines.answered[0]["kv_transfer_params"] == {PROMPT_IDS: [1, 2, 10, 11]}


def test_a_stream_that_has_begun_is_never_cut_in_silence() -> None:
    """Here by a ticket without its token ids."""
    last = events(Engines({FACTS: FACTS_SENT}))[-1]
    assert last["error"]["code"] == 500
    assert "KeyError" in last["error"]["message"]
