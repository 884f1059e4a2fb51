"""How a request ends when its engine aborts it, or is lost near its end or with held-back text."""

import asyncio

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from stub_engines import (
    ANSWER,
    BODY,
    CHAT,
    COMPLETIONS,
    LEAVES,
    THOUGHT,
    TICKET,
    USAGE,
    Refuses,
    StubEngine,
    chunk,
    content,
    events,
    moved,
    post,
    routed,
)

from meridian_patch.handoff.ticket import FACTS, PROMPT_IDS

ROLE = {**chunk(delta={"role": "assistant", "content": ""}), PROMPT_IDS: [1, 2]}
CALL = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
LOST = None


def whole(**choice) -> dict:
    message = {"role": "assistant", "content": "6.", "reasoning": "hm"}
    made = {"index": 0, "message": message, "finish_reason": "stop"} | choice
    return {"id": "x", "choices": [made], "usage": dict(USAGE)}


def between(first: list, second: list, **body) -> tuple[httpx.Response, StubEngine]:
    """A stream that the first think engine begins, and what the second one was sent."""
    other = StubEngine(second)
    response, _ = post({"a": StubEngine(first), "c": other}, BODY | body, answer=())
    return response, other


def test_a_thought_that_an_engine_aborts_goes_on_at_another() -> None:
    """As one that drains: upstream ends requests so, and its /health is 200."""
    aborted = [*THOUGHT[:2], chunk(11, finish_reason="abort")]
    response, other = between(aborted, ANSWER[1:])
    assert content(response) == ("hm", "6.")
    assert other.bodies[0]["kv_transfer_params"][PROMPT_IDS] == [1, 2, 10, 11]
    assert "abort" not in response.text


def test_an_engine_that_aborts_all_stays_for_requests_that_find_no_other() -> None:
    script = [ROLE, chunk(finish_reason="abort")]
    response, router = post({"a": StubEngine(script)}, answer=())
    assert response.status_code == 200
    assert events(response)[-1]["error"]["code"] == 503
    assert router.pool.engines[0].is_healthy


def test_a_whole_response_that_was_aborted_is_asked_elsewhere() -> None:
    first, other = StubEngine(whole(finish_reason="abort")), StubEngine(whole())
    response, _ = post({"a": first, "c": other}, {"messages": []}, answer=())
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert len(other.bodies) == 1


@pytest.mark.parametrize("ids", (None, [1]), ids=("another-field", "no-ids"))
def test_a_whole_response_with_a_wrong_ticket_is_asked_elsewhere(ids) -> None:
    """The answer engine serves it from its beginning."""
    ticket = {**TICKET, FACTS: {**TICKET[FACTS], "new": 1}}
    if ids is None:
        ticket = {name: value for name, value in TICKET.items() if name != PROMPT_IDS}
    thought = {**whole(finish_reason="length"), "kv_transfer_params": ticket}
    answer = StubEngine(whole())
    response, _ = post({"a": StubEngine(thought), "b": answer}, {"messages": []})
    assert response.json()["choices"][0]["message"]["content"] == "6."
    assert "kv_transfer_params" not in answer.bodies[0]


@pytest.mark.parametrize(
    ("last", "body"),
    (
        ({"delta": {"tool_calls": [CALL]}, "finish_reason": "tool_calls"}, TOOLS),
        ({"delta": {"content": "6"}, "finish_reason": "stop"}, {"stop": ["x"]}),
    ),
    ids=("tool-call", "stop"),
)
def test_a_stream_that_lacks_only_its_end_is_whole(last: dict, body: dict) -> None:
    asked = {"stream_options": {"include_usage": True}, **body}
    response, other = between([ROLE, chunk(20, **last), LOST], [], **asked)
    assert not other.bodies
    assert "error" not in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    expected = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    assert events(response)[-1]["usage"] == expected


def test_a_completion_with_stop_strings_answers_where_it_thought() -> None:
    """Its thought came as text, which is no answer of the engine that is down."""

    def text(token: int | None, said: str, **choice) -> dict:
        return chunk(token, text=said, **choice)

    first = {**text(10, "<think>hm"), PROMPT_IDS: [1, 2]}
    leaves = {**text(None, "", finish_reason="length"), "kv_transfer_params": TICKET}
    think = StubEngine([first, text(11, "</think>"), leaves], [text(12, "6", finish_reason="stop")])

    async def run() -> tuple[httpx.Response, dict]:
        async with routed(["a"], ["b"], {"a": think, "b": Refuses()}) as (client, router):
            body = {"prompt": "q", "stream": True, "max_tokens": 100, "stop": ["\n\n"]}
            return await client.post(COMPLETIONS, json=body), moved(router)

    response, counts = asyncio.run(run())
    assert [each["choices"][0]["text"] for each in events(response)] == [
        "<think>hm",
        "</think>",
        "6",
    ]
    assert counts["answered_again"] == 1


def test_tokens_of_which_the_client_has_the_ids_are_not_sampled_again() -> None:
    """The ids would come twice."""
    first = [ROLE, chunk(5), chunk(6), LOST]
    response, other = between(first, [ROLE, *ANSWER[1:]], return_token_ids=True)
    assert other.bodies[0]["kv_transfer_params"][PROMPT_IDS] == [1, 2, 5, 6]
    ids = [c["token_ids"] for each in events(response) for c in each["choices"]]
    assert [token for each in ids for token in each] == [5, 6, 12, 13]


@pytest.mark.parametrize(
    "told", ({"return_token_ids": True}, {"logprobs": True}), ids=("ids", "logprobs")
)
def test_a_tool_call_whose_beginning_was_told_cannot_go_on(told: dict) -> None:
    """Sampled again its tokens would come twice; as prompt the call would come as text."""
    logprobs = {"content": [{"token": "t", "logprob": -1.0}]}
    begun = [ROLE, chunk(10, delta={"content": "ok"}), chunk(19, logprobs=logprobs), LOST]
    response, other = between(begun, ANSWER, **TOOLS, **told)
    assert events(response)[-1]["error"]["code"] == 503
    assert not other.bodies


def test_text_that_an_answer_engine_held_back_cannot_go_on_once_told() -> None:
    think = StubEngine([*THOUGHT, *LEAVES], ANSWER)
    answer = StubEngine([ROLE, chunk(12), LOST])
    body = BODY | {"stop": ["XX"], "return_token_ids": True}
    response, _ = post({"a": think, "b": answer}, body)
    assert events(response)[-1]["error"]["code"] == 503
    assert len(think.bodies) == 1


@pytest.mark.parametrize("value", ("off", "no", "False", 0))
def test_reasoning_is_hidden_however_vllm_reads_it(value) -> None:
    response, _ = post(
        {"a": StubEngine([*THOUGHT, *ANSWER[1:]])}, BODY | {"include_reasoning": value}
    )
    assert content(response) == ("", "6.")


def test_a_stream_may_be_refused_in_words() -> None:
    response, _ = post({"a": StubEngine(whole())}, {"messages": [], "stream": "false"}, answer=())
    assert response.json()["choices"][0]["message"]["content"] == "6."


def test_what_each_endpoint_reads_alone_is_not_offered() -> None:
    think = StubEngine(ANSWER)
    post({"a": think, "b": StubEngine()}, {**BODY, "prompt": ["q", "r"]})
    assert "kv_transfer_params" not in think.bodies[0]


@pytest.mark.parametrize("prompts", (["p", "q"], [[1, 2], [3]]), ids=("texts", "ids"))
def test_a_prompt_without_its_end_is_an_error(prompts) -> None:
    """Each prompt of a completion has a choice of its own."""

    def text(index: int, said: str, **choice) -> dict:
        return {"id": "x", "choices": [{"index": index, "text": said, "token_ids": [5]} | choice]}

    begun = [text(0, "A"), text(1, "B"), text(0, "a", finish_reason="stop")]

    async def run(script: list) -> str:
        async with routed(["a"], [], {"a": StubEngine(script)}) as (client, _):
            body = {"prompt": prompts, "stream": True}
            return (await client.post(COMPLETIONS, json=body)).text

    assert '"error"' in asyncio.run(run([*begun, LOST]))
    said = asyncio.run(run([*begun, text(1, "b", finish_reason="stop")]))
    assert '"error"' not in said
    assert said.endswith("data: [DONE]\n\n")


def test_stop_strings_bind_only_an_engine_that_has_begun_the_answer() -> None:
    """The answer engine is down, the one that thought is full, and a third one is healthy."""

    class FullLater(StubEngine):
        async def _chat(self, request: Request) -> Response:
            self.status = 503 if self.bodies else 200
            return await super()._chat(request)

    full, third = FullLater([*THOUGHT, *LEAVES]), StubEngine(ANSWER)

    async def run() -> httpx.Response:
        stubs = {"a": full, "c": third, "b": Refuses()}
        async with routed(["a", "c"], ["b"], stubs) as (client, _):
            return await client.post(CHAT, json=BODY | {"stop": ["zz"]})

    assert content(asyncio.run(run())) == ("hm", "6.")
    assert third.bodies[0]["kv_transfer_params"][PROMPT_IDS] == [1, 2, 10, 11]


@pytest.mark.parametrize("value", ("false", "off", 0))
def test_words_for_no_are_no(value) -> None:
    body = BODY | {"return_token_ids": value, "stream_options": {"include_usage": value}}
    response, _ = post({"a": StubEngine([*THOUGHT, *ANSWER[1:]])}, body, answer=())
    assert "usage" not in response.text
    assert not any(c["token_ids"] for each in events(response) for c in each["choices"])
