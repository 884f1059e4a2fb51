"""A real server streams thoughts in larger pieces, and answers token by token."""

import json

import pytest

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "p=7, q=p+5, r=q*3. r?"}],
    "temperature": 0,
    "max_tokens": 300,
    "return_token_ids": True,
}
INTERVAL = 8


def ask(server, **more) -> str:
    status, text = server.post(CHAT, BODY | more)
    assert status == 200, text
    return text


def chunks(server, **more) -> list[dict]:
    """The choices of a stream, one by one."""
    lines = [line.removeprefix("data: ") for line in ask(server, stream=True, **more).splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.parametrize("more", ({}, {"logprobs": True}), ids=("plain", "logprobs"))
def test_a_thought_comes_in_pieces_and_an_answer_by_token(traced, more):
    """Joined they are what a response that is not streamed has."""
    (expected,) = json.loads(ask(traced, **more))["choices"]
    streamed = chunks(traced, **more)
    check_sizes(streamed)
    ids = [token for each in streamed for token in each.get("token_ids") or ()]
    assert ids == expected["token_ids"]
    for name in ("reasoning", "content"):
        text = "".join(each["delta"].get(name) or "" for each in streamed)
        assert text == expected["message"][name]
    if more.get("logprobs"):
        entries = [(each["logprobs"] or {}).get("content", ()) for each in streamed]
        assert sum(map(len, entries)) == len(ids)


def test_each_choice_has_pieces_of_its_own(traced):
    streamed = chunks(traced, n=2, temperature=0.8)
    for index in range(2):
        check_sizes([each for each in streamed if each["index"] == index])


def check_sizes(streamed) -> None:
    """Thoughts in whole pieces, answers by token; vLLM joins pieces that were not read in time."""
    sizes = {
        name: [len(each["token_ids"]) for each in streamed if each["delta"].get(name)]
        for name in ("reasoning", "content")
    }
    assert len(sizes["reasoning"]) > 3
    # The last one has what is left, and the end marker.
    assert {size % INTERVAL for size in sizes["reasoning"][1:-1]} == {0}
    assert min(sizes["content"]) == 1
    assert max(sizes["content"]) < INTERVAL


def test_a_request_may_have_larger_pieces_of_its_own(traced):
    """vLLM's own field holds for both phases."""
    mine = chunks(traced, stream_interval=11)
    thought = [len(each["token_ids"]) for each in mine if each["delta"].get("reasoning")]
    assert {size % 11 for size in thought[1:-1]} == {0}
