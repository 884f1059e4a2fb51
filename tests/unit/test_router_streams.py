"""Streams of the router that meet what no engine should send."""

import asyncio
import json
from copy import deepcopy

import httpx

from meridian_patch.handoff.ticket import FACTS, PROMPT_IDS
from meridian_patch.router.app import Router
from meridian_patch.router.command import engines_of
from meridian_patch.router.stream_state import StreamState

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
        self.thought = [*deepcopy(THOUGHT), {**chunk(None, finish_reason="length")}]
        self.thought[-1]["kv_transfer_params"] = ticket
        self.answered: list[dict] = []
        # With these, the first answer is lost, and the think engine gives the second one.
        self.lost_answer: list[dict] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path in {"/health", "/metrics"}:
            return httpx.Response(200)
        is_thought = request.url.host == "a" and not self.answered
        if not is_thought:
            self.answered.append(json.loads(request.content))
        lost, self.lost_answer = self.lost_answer, self.lost_answer if is_thought else []
        is_lost = bool(lost) and not is_thought
        script = self.thought if is_thought else lost if is_lost else ANSWER
        lines = [f"data: {json.dumps(each)}\n\n" for each in script]
        return httpx.Response(200, text="".join([*lines, "" if is_lost else "data: [DONE]\n\n"]))


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
    """Here by a choice that is no object."""
    engines = Engines({})
    engines.thought[1] = {"choices": [7]}
    last = events(engines)[-1]
    assert last["error"]["code"] == 500
    assert "AttributeError" in last["error"]["message"]


def taken(body: dict, *chunks: dict) -> StreamState:
    """What is known after these chunks, the first of them with the prompt's ids."""
    state = StreamState(body)
    for each in chunks:
        state.take(each)
    return state


def test_tokens_of_which_the_client_has_nothing_can_be_sampled_again() -> None:
    """A stop string or a tool call that has begun holds the text of the last ones back."""
    prompt = {**chunk(10, "ok"), PROMPT_IDS: [1, 2]}
    held_back = [chunk(19), chunk(20)]
    state = taken({"tools": [{}]}, prompt, *held_back)
    state.forget_unshown()
    assert state.token_ids == [1, 2, 10]
    assert state.num_output_tokens == 1

    state = taken({"return_token_ids": True}, {**chunk(10, "ok"), PROMPT_IDS: [1, 2]}, chunk(19))
    state.forget_unshown()
    assert state.token_ids == [1, 2, 10, 19]

    state = taken(
        {"include_reasoning": False},
        {"choices": [{"delta": {"reasoning": "hm"}, "token_ids": [10]}], PROMPT_IDS: [1, 2]},
        chunk(11),
    )
    state.forget_unshown()
    assert state.token_ids == [1, 2, 10]


def test_what_a_ticket_allows_is_allowed_once() -> None:
    """After a loss, too, and one token at least."""
    state = taken({}, {**chunk(10, "hm"), PROMPT_IDS: [1, 2]})
    assert state.num_tokens_left is None
    state.continue_from({PROMPT_IDS: [1, 2, 10, 11], FACTS: FACTS_SENT | {"max_tokens_left": 3}})
    assert state.num_tokens_left == 3
    state.take(chunk(12, "6"))
    assert state.num_tokens_left == 2
    state.take({"choices": [{"delta": {}, "token_ids": [13, 14, 15]}]})
    assert state.num_tokens_left == 1


def test_an_answer_that_was_held_back_is_sampled_again() -> None:
    """The answer engine is lost before the client has any of it."""
    engines = Engines({PROMPT_IDS: [1, 2, 10, 11], FACTS: FACTS_SENT})
    engines.thought[0]["choices"][0]["delta"] = {"reasoning": "hm"}
    engines.lost_answer = [chunk(12)]
    deltas = [choice["delta"] for each in events(engines) for choice in each["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "6."
    assert engines.answered[-1]["kv_transfer_params"] == {PROMPT_IDS: [1, 2, 10, 11]}
    assert engines.answered[-1]["max_tokens"] == 98
