"""The router against servers that fail: which engine serves what, and what the client gets."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from stub_engines import (
    ANSWER,
    BODY,
    CHAT,
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

from meridian_patch.errors import ConfigError
from meridian_patch.handoff.requests import resume
from meridian_patch.handoff.ticket import PROMPT_IDS, RELEASE
from meridian_patch.router.app import Router
from meridian_patch.router.command import engines_of
from meridian_patch.router.load import load_from
from meridian_patch.router.pool import POLL_S


def test_a_request_moves() -> None:
    """The client sees one stream, without what the engines exchange."""
    think, answer = (
        StubEngine([*THOUGHT, *LEAVES, {"choices": [], "usage": USAGE}]),
        StubEngine(ANSWER),
    )
    body = BODY | {"max_tokens": 100, "stream_options": {"include_usage": True}}
    response, router = post({"a": think, "b": answer}, body)
    assert content(response) == ("hm", "6.")
    assert not any(c["token_ids"] for e in events(response) for c in e["choices"])
    assert "kv_transfer_params" not in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    roles = [c["delta"].get("role") for e in events(response) for c in e["choices"]]
    assert roles.count("assistant") == 1
    finish = [c.get("finish_reason") for e in events(response) for c in e["choices"]]
    assert [each for each in finish if each] == ["stop"]
    usage = events(response)[-1]["usage"]
    assert usage == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert think.bodies[0]["kv_transfer_params"] == {"do_remote_decode": True}
    (sent,) = answer.bodies
    assert sent["kv_transfer_params"][PROMPT_IDS] == [1, 2, 10, 11]
    assert sent["kv_transfer_params"]["remote_engine_id"] == "one"
    assert sent["max_tokens"] == 98
    assert moved(router) == {"moved": 1, "answered_again": 0, "resumed": 0}


@pytest.mark.parametrize("fails", ("down", "500", "400", "breaks off"))
def test_an_answer_engine_that_fails_at_once_loses_nothing(fails: str) -> None:
    """The think engine answers from its own cache."""
    think = StubEngine([*THOUGHT, *LEAVES], ANSWER)
    answer = StubEngine([ANSWER[0], None], status=int(fails) if fails.isdigit() else 200)
    stubs = {"a": think, "b": answer}
    if fails == "down":

        async def run() -> tuple[httpx.Response, Router]:
            async with routed(["a"], ["b"], stubs) as (client, router):
                del router.pool._client._transport._transports["b"]
                return await client.post(CHAT, json=BODY), router

        response, router = asyncio.run(run())
    else:
        response, router = post(stubs)
    assert content(response) == ("hm", "6.")
    again = think.bodies[1]
    assert again["kv_transfer_params"] == {PROMPT_IDS: [1, 2, 10, 11]}
    assert moved(router) == {"moved": 0, "answered_again": 1, "resumed": 0}
    # An error that a request may have caused does not take the engine from others.
    if fails != "breaks off":
        assert router.pool.engines[1].is_healthy == fails.isdigit()


def test_an_answer_goes_on_after_the_tokens_sent() -> None:
    think = StubEngine([*THOUGHT, *LEAVES], [ANSWER[0], *ANSWER[2:]])
    answer = StubEngine([*ANSWER[:2], None])
    response, router = post({"a": think, "b": answer})
    assert content(response) == ("hm", "6.")
    assert think.bodies[1]["kv_transfer_params"] == {PROMPT_IDS: [1, 2, 10, 11, 12]}
    assert moved(router)["moved"] == 1


@pytest.mark.parametrize(
    ("delta", "body"),
    (({"tool_calls": [{"index": 0}]}, {}), ({"content": "6"}, {"stop": ["67"]})),
    ids=("tool call", "stop string"),
)
def test_what_no_other_engine_can_continue_ends_with_an_error(delta: dict, body: dict) -> None:
    think = StubEngine([*THOUGHT, *LEAVES])
    answer = StubEngine([ANSWER[0], chunk(12, delta=delta), None])
    response, _ = post({"a": think, "b": answer}, BODY | body)
    assert events(response)[-1]["error"]["code"] == 503
    assert "[DONE]" not in response.text


def test_a_ticket_never_goes_to_a_think_engine() -> None:
    """The answer engine was lost while the request thought: the blocks are the think engine's."""
    answer = StubEngine()

    class Thinks(StubEngine):
        async def _events(self, script: list[dict | None]) -> AsyncIterator[str]:
            for engine in engines:
                if engine.role == "answer":
                    engine.is_healthy = False
            async for event in super()._events(script):
                yield event

    think = Thinks([*THOUGHT, *LEAVES], ANSWER)
    engines = []

    async def run() -> tuple[httpx.Response, Router]:
        async with routed(["a"], ["b"], {"a": think, "b": answer}) as (client, router):
            engines.extend(router.pool.engines)
            return await client.post(CHAT, json=BODY), router

    response, router = asyncio.run(run())
    assert content(response) == ("hm", "6.")
    assert think.bodies[1]["kv_transfer_params"] == {PROMPT_IDS: [1, 2, 10, 11]}
    assert moved(router) == {"moved": 0, "answered_again": 1, "resumed": 0}


@pytest.mark.parametrize("is_known", (True, False), ids=("out", "refuses"))
def test_blocks_for_a_lost_answer_engine_need_not_be_kept(is_known: bool) -> None:
    """It got no ticket, so the engine that has the blocks is told, and goes on."""
    ticket = {**TICKET, "remote_request_id": "r1"}
    leaves = [{**chunk(finish_reason="length"), "kv_transfer_params": ticket}]

    class Thinks(StubEngine):
        async def _events(self, script: list[dict | None]) -> AsyncIterator[str]:
            for engine in engines:
                if engine.role == "answer":
                    engine.is_healthy = not is_known
                elif engine.url == "http://a":
                    # The other think engine has less to do.
                    engine.num_requests += 5
            async for event in super()._events(script):
                yield event

    think, other = Thinks([*THOUGHT, *leaves], ANSWER), StubEngine(ANSWER)
    stubs = {"a": think, "c": other, "b": Refuses()}
    engines = []

    async def run() -> httpx.Response:
        async with routed(["a", "c"], ["b"], stubs) as (client, router):
            engines.extend(router.pool.engines)
            return await client.post(CHAT, json=BODY)

    response = asyncio.run(run())
    assert content(response) == ("hm", "6.")
    assert think.bodies[1]["kv_transfer_params"] == {PROMPT_IDS: [1, 2, 10, 11], RELEASE: "r1"}
    assert not other.bodies


def test_blocks_for_an_answer_engine_that_got_the_ticket_are_kept() -> None:
    """It may still read them."""
    ticket = {**TICKET, "remote_request_id": "r1"}
    leaves = [{**chunk(finish_reason="length"), "kv_transfer_params": ticket}]
    think = StubEngine([*THOUGHT, *leaves], ANSWER)
    post({"a": think, "b": StubEngine([None])})
    assert RELEASE not in think.bodies[1]["kv_transfer_params"]


def test_a_thought_goes_on_at_another_think_engine() -> None:
    first, second = StubEngine([*THOUGHT[:2], None]), StubEngine([*THOUGHT[2:], *LEAVES])
    response, router = post({"a": first, "c": second, "b": StubEngine(ANSWER)})
    assert content(response) == ("hm", "6.")
    assert second.bodies[0]["kv_transfer_params"][PROMPT_IDS] == [1, 2, 10]
    assert moved(router)["resumed"] == 1


def test_an_engine_whose_connection_broke_may_go_on() -> None:
    """No other one is there, and it is healthy at the check that follows at once."""
    only = StubEngine([*THOUGHT[:2], None], [*THOUGHT[2:], *ANSWER[1:]])
    begin = time.monotonic()
    response, router = post({"a": only}, answer=())
    assert content(response) == ("hm", "6.")
    assert time.monotonic() - begin < POLL_S / 2
    assert moved(router)["resumed"] == 1
    whole = {"choices": [{"index": 0, "message": {"content": "6."}, "finish_reason": "stop"}]}
    again = StubEngine([None], whole)
    response, _ = post({"a": again}, BODY | {"stream": False}, answer=())
    assert response.json()["choices"][0]["message"]["content"] == "6."


def test_a_request_that_breaks_every_connection_is_given_up() -> None:
    only = StubEngine(*([*THOUGHT[:2], None] for _ in range(9)))
    response, _ = post({"a": only}, answer=())
    assert events(response)[-1]["error"]["code"] == 503
    assert len(only.bodies) == 4


def test_a_refusal_is_the_clients() -> None:
    response, _ = post({"a": StubEngine(status=400), "b": StubEngine()})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "no"


def test_without_an_engine_clients_are_told_when_to_come_back() -> None:
    response, _ = post({}, answer=())
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"


def test_without_an_answer_engine_nothing_is_offered() -> None:
    think = StubEngine([*THOUGHT, *ANSWER[1:]])
    response, _ = post({"a": think}, answer=())
    assert content(response) == ("hm", "6.")
    assert "kv_transfer_params" not in think.bodies[0]


def test_tickets_of_clients_are_not_passed_on() -> None:
    think = StubEngine([*THOUGHT, *ANSWER[1:]])
    post({"a": think}, BODY | {"kv_transfer_params": {"remote_host": "elsewhere"}}, answer=())
    assert "kv_transfer_params" not in think.bodies[0]


@pytest.mark.parametrize(
    "body",
    (
        {"n": 2},
        {"use_beam_search": True},
        {"echo": True},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ),
    ids=str,
)
def test_what_cannot_move_is_not_offered(body: dict) -> None:
    think = StubEngine([*THOUGHT, *ANSWER[1:]])
    post({"a": think, "b": StubEngine()}, BODY | body)
    assert "kv_transfer_params" not in think.bodies[0]


@pytest.mark.parametrize("content", (b"{", b"[]"))
def test_a_body_that_is_no_object_is_refused(content: bytes) -> None:
    async def run() -> httpx.Response:
        async with routed(["a"], [], {"a": StubEngine()}) as (client, _):
            return await client.post(CHAT, content=content)

    response = asyncio.run(run())
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("think", "answer", "says"),
    (
        (["a:8000"], [], "--think is 'a:8000'"),
        (["http://a"], ["http://b/v1"], "--answer is 'http://b/v1'"),
        (["http://a", "http://a/"], [], "given twice"),
    ),
)
def test_wrong_addresses_are_refused(think: list[str], answer: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engines_of(think, answer)


def test_the_engine_with_the_least_load_is_chosen() -> None:
    """Answers weigh twice; what was sent since the last check counts."""
    first, second = engines_of(["http://a", "http://b"], [])
    page = (
        'vllm:num_requests_running{engine="0"} 3.0\n'
        'vllm:num_requests_running{engine="1"} 1.0\n'
        'vllm:num_requests_waiting{engine="0"} 2.0\n'
        'meridian_requests{engine="0",phase="answer"} 2.0\n'
        'meridian_requests{engine="0",phase="think"} 1.0\n'
    )
    assert load_from(page) == 8
    first.passed(8)
    second.passed(7)
    assert second.weight < first.weight
    second.num_requests += 2
    assert first.weight < second.weight


def test_one_bad_request_takes_no_engine_from_others() -> None:
    """An error that it causes at each engine is its client's."""
    stubs = {name: StubEngine(status=501) for name in ("a", "c", "b")}
    response, router = post(stubs)
    assert response.status_code == 501
    assert all(engine.is_healthy for engine in router.pool.engines)


@pytest.mark.parametrize(
    "body",
    ({"n": 2}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ids=("choices", "media"),
)
def test_what_cannot_move_is_not_resumed_either(body: dict) -> None:
    first, second = StubEngine([*THOUGHT, None]), StubEngine(ANSWER)
    response, _ = post({"a": first, "c": second}, BODY | body, answer=())
    assert not second.bodies
    assert events(response)[-1]["error"]["code"] == 503


def test_hidden_reasoning_stays_hidden_and_is_resumed() -> None:
    """Engines are asked for it, because vLLM hides the token ids with it."""
    think = StubEngine([*THOUGHT, *LEAVES], [ANSWER[0], *ANSWER[2:]])
    answer = StubEngine([*ANSWER[:2], None])
    body = BODY | {"include_reasoning": False, "return_token_ids": True}
    response, _ = post({"a": think, "b": answer}, body)
    assert content(response) == ("", "6.")
    assert "hm" not in response.text
    assert not any(c["token_ids"] for e in events(response) for c in e["choices"])


def test_a_grammar_is_not_begun_again_within_its_answer() -> None:
    think = StubEngine([*THOUGHT, *LEAVES], ANSWER)
    answer = StubEngine([*ANSWER[:2], None])
    response, _ = post({"a": think, "b": answer}, BODY | {"response_format": {"type": "json"}})
    assert events(response)[-1]["error"]["code"] == 503
    assert len(think.bodies) == 1


def test_an_answer_engine_that_stands_in_is_offered_nothing() -> None:
    answer = StubEngine([*THOUGHT, *ANSWER[1:]])

    async def run() -> httpx.Response:
        async with routed(["a"], ["b"], {"b": answer}) as (client, _):
            return await client.post(CHAT, json=BODY)

    assert content(asyncio.run(run())) == ("hm", "6.")
    assert "kv_transfer_params" not in answer.bodies[0]


def test_usage_counts_the_prompt_once_after_a_loss() -> None:
    first = StubEngine([*THOUGHT[:2], None])
    tail = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}}
    second = StubEngine([chunk(11), *ANSWER[1:3], tail])
    body = BODY | {"stream_options": {"include_usage": True}}
    response, _ = post({"a": first, "c": second}, body, answer=())
    usage = events(response)[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 4)


@pytest.mark.parametrize(
    "content",
    (
        b'{"temperature": NaN}',
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
        b'{"n": {}, "prompt": 5}',
        b'{"stream": true, "n": 0}',
        b'{"stream": true, "stream_options": "x"}',
        b'{"stream": true, "stream_options": [1]}',
    ),
)
def test_any_body_gets_an_answer(content: bytes) -> None:
    async def run() -> httpx.Response:
        async with routed(["a"], [], {"a": StubEngine(status=400)}) as (client, _):
            return await client.post(CHAT, content=content)

    assert asyncio.run(run()).status_code == 400


def test_xargs_carry_no_ticket_either() -> None:
    think = StubEngine([*THOUGHT, *ANSWER[1:]])
    sent = {"vllm_xargs": {"kv_transfer_params": "x", "meridian_priority": 1}}
    post({"a": think}, BODY | sent, answer=())
    assert think.bodies[0]["vllm_xargs"] == {"meridian_priority": 1}


def test_budgets_go_on_with_a_thought() -> None:
    body = {
        "prompt": "q",
        "thinking_token_budget": 50,
        "vllm_xargs": {"meridian_max_think_tokens": 9},
    }
    after = resume(body, [1, 2, 10, 11], 2)
    assert after["prompt"] == [1, 2, 10, 11]
    assert after["thinking_token_budget"] == 48
    assert after["vllm_xargs"]["meridian_max_think_tokens"] == 7


def test_our_budget_at_the_top_level_goes_on_too() -> None:
    """In one place: an engine refuses a field that it finds in two."""
    body = {"prompt": "q", "meridian_max_think_tokens": 9, "vllm_xargs": {"a": 1}}
    after = resume(body, [1, 2, 10, 11], 2)
    assert after["vllm_xargs"] == {"a": 1, "meridian_max_think_tokens": 7}
    assert "meridian_max_think_tokens" not in after


def test_a_floor_goes_on_too_and_none_is_added() -> None:
    """An engine may allow the bound alone, and refuses a field that its client never sent."""
    bound = {"meridian_max_think_tokens": 9}
    for floor, left in (
        (None, {}),
        (5, {"meridian_min_think_tokens": 1}),
        (1, {"meridian_min_think_tokens": 0}),
    ):
        ours = bound | ({} if floor is None else {"meridian_min_think_tokens": floor})
        after = resume({"prompt": "q", "vllm_xargs": ours}, [1, 2, 3, 4, 5], 4)
        assert after["vllm_xargs"] == {"meridian_max_think_tokens": 5} | left


@pytest.mark.parametrize(
    ("reserve", "left"), [(30, 30), (60, 49), (0.25, 25)], ids=["less", "more", "share"]
)
def test_a_reserve_stays_below_what_is_left(reserve: float, left: float) -> None:
    """The engine would refuse it otherwise, and with it the rest of the answer."""
    body = {"prompt": "q", "max_tokens": 100, "vllm_xargs": {"meridian_answer_reserve": reserve}}
    assert resume(body, [1], 50)["vllm_xargs"] == {"meridian_answer_reserve": left}
    assert resume(body, [1], 9, num_tokens_left=50)["vllm_xargs"]["meridian_answer_reserve"] == left


def test_a_reserve_goes_with_the_last_token() -> None:
    """Nothing is left to keep it from."""
    body = {"prompt": "q", "max_tokens": 100, "vllm_xargs": {"meridian_answer_reserve": 30}}
    assert resume(body, [1], 99)["vllm_xargs"] == {}


def test_a_whole_response_of_two_engines() -> None:
    """Content, tool calls and log-probabilities are put together as they come."""
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": []}
    first = {
        "id": "x",
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        "usage": USAGE,
        "kv_transfer_params": TICKET,
    }
    pieces = [{"name": "add", "arguments": '{"a"'}, {"arguments": ": 1}"}]
    calls = [
        {"index": 0, "id": "c1" if n == 0 else None, "function": p} for n, p in enumerate(pieces)
    ]
    answer = StubEngine(
        [
            chunk(12, delta={"content": "6"}, logprobs={"content": [{"token": "6"}]}),
            chunk(13, delta={"tool_calls": calls[:1]}),
            chunk(14, delta={"tool_calls": calls[1:]}, finish_reason="tool_calls"),
            {
                "choices": [],
                "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
            },
        ]
    )
    think = StubEngine(first)
    body = {name: value for name, value in BODY.items() if name != "stream"}
    response, router = post({"a": think, "b": answer}, body)
    said = response.json()
    (choice,) = said["choices"]
    assert choice["message"]["reasoning"] == "hm"
    assert choice["message"]["content"] == "6"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choice["logprobs"]["content"] == [{"token": "6"}]
    assert choice["finish_reason"] == "tool_calls"
    assert said["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert "kv_transfer_params" not in said
    assert moved(router)["moved"] == 1
