"""A real server takes fields of ours wherever a body has them."""

import json

import pytest
from openai import BadRequestError, OpenAI
from workloads import THINK_END

pytestmark = pytest.mark.engine

QUESTION = "p=7, q=p+5, r=q*3. r?"
MESSAGES = [{"role": "user", "content": QUESTION}]
CHAT, RESPONSES, MESSAGES_API = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = "/v1/completions"
CAPPED = {
    "meridian_max_think_tokens": 8,
    "meridian_min_think_tokens": 0,
    "meridian_exit": "enforce",
}


@pytest.fixture(scope="module")
def bodies(served):
    """A request that thinks, by endpoint; of completions with the tokens of the chat's prompt."""
    chat = {"messages": MESSAGES, "max_tokens": 300}
    status, text = served.post(CHAT, chat | {"max_tokens": 1, "return_token_ids": True})
    assert status == 200, text
    return {
        CHAT: chat,
        COMPLETIONS: {"prompt": json.loads(text)["prompt_token_ids"], "max_tokens": 300},
        RESPONSES: {"input": QUESTION, "max_output_tokens": 300},
        MESSAGES_API: {"model": "m", **chat},
    }


def thought_of(served, path, body):
    """The text before the end of thinking."""
    status, text = served.post(path, body | {"temperature": 0})
    assert status == 200, text
    reply = json.loads(text)
    if path == CHAT:
        said = reply["choices"][0]["message"]["content"]
    elif path == COMPLETIONS:
        said = reply["choices"][0]["text"]
    else:
        parts = reply["content"] if path == MESSAGES_API else reply["output"][0]["content"]
        said = "".join(part["text"] for part in parts)
    thought, marker, _ = said.partition(THINK_END)
    assert marker
    return thought


@pytest.mark.parametrize("path", (CHAT, COMPLETIONS, RESPONSES, MESSAGES_API))
def test_a_field_at_the_top_level_of_a_body_works(served, bodies, path):
    """As in `vllm_xargs`; a wrong one, `true` for a number, and one in both places are HTTP 400."""
    body = bodies[path]
    inner = thought_of(served, path, body | {"vllm_xargs": CAPPED})
    assert thought_of(served, path, body | CAPPED) == inner
    assert len(inner) < len(thought_of(served, path, body))
    for wrong, says in (
        ({"meridian_exit": "on"}, "field meridian_exit is 'on', expected 'off', 'observe'"),
        ({"meridian_exits": "off"}, "field meridian_exits is 'off', expected a field that exists"),
        ({"meridian_priority": True}, "field meridian_priority is True, expected a valid integer"),
        ({"vllm_xargs": {"meridian_priority": True}}, "field meridian_priority is True, expected"),
        ({**CAPPED, "vllm_xargs": CAPPED}, "is at the top level of the body and in vllm_xargs"),
    ):
        for is_streamed in (False, True):
            status, text = served.post(path, body | {"stream": is_streamed} | wrong)
            assert status == 400, text
            assert says in text


def test_extra_body_of_the_openai_package_works(served, bodies):
    """What its users write for a server of vLLM's."""
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none")
    asked = {"model": "m", "temperature": 0, "extra_body": CAPPED}
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=300, **asked)
    assert chat.choices[0].meridian["exit_reason"] == "hard_cap"
    prompt = bodies[COMPLETIONS]["prompt"]
    completion = client.completions.create(prompt=prompt, max_tokens=300, **asked)
    assert completion.choices[0].meridian["exit_reason"] == "hard_cap"
    response = client.responses.create(input=QUESTION, max_output_tokens=300, **asked)
    assert response.meridian["exit_reason"] == "hard_cap"
    asked["extra_body"] = {"meridian_max_think_tokens": True}
    with pytest.raises(BadRequestError, match="meridian_max_think_tokens is True, expected"):
        client.chat.completions.create(messages=MESSAGES, **asked)
