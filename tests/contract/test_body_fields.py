"""Fields of ours in a body, on vLLM's own request models and Starlette's request."""

import asyncio
import json

import pytest
from starlette.requests import Request
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMClientError

from meridian_patch.config.request_options import parse_options
from meridian_patch.engine.api.body_fields import move_fields, restore_fields
from meridian_patch.errors import ConfigError

MESSAGES = [{"role": "user", "content": "2+2? meridian_exit"}]
MODELS = {
    ChatCompletionRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "2+2?"},
    ResponsesRequest: {"input": "2+2?"},
}


def as_sent(body):
    """Starlette's request, whose body comes over the wire."""
    content = json.dumps(body).encode()

    async def receive():
        return {"type": "http.request", "body": content, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def served(model, is_http=True, **fields):
    """A request as the serving class has it before it passes it on."""
    body = MODELS[model] | fields
    request = model(**body)
    asyncio.run(restore_fields(request, as_sent(body) if is_http else None))
    move_fields(request)
    return request


@pytest.mark.parametrize("is_http", [True, False], ids=["http", "in the process"])
@pytest.mark.parametrize("model", MODELS)
def test_a_field_at_the_top_level_reaches_the_engine(model, is_http):
    """Beside the fields of `vllm_xargs`, ours or others'."""
    fields = {"vllm_xargs": {"meridian_priority": 3, "a": "b"}, "meridian_exit": "observe"}
    request = served(model, is_http, **fields)
    params = request.to_sampling_params(9, {})
    wanted = {"meridian_priority": 3, "a": "b", "meridian_exit": "observe"}
    assert params.extra_args == wanted
    assert not request.model_extra


@pytest.mark.parametrize("model", MODELS)
def test_without_fields_of_ours_nothing_changes(model):
    """Also where the text of a prompt holds their names."""
    assert served(model).vllm_xargs is None
    others = {"a": 1, "b": "meridian_"}
    request = served(model, vllm_xargs=others, somebody_elses="meridian_exit")
    assert request.vllm_xargs == others
    assert request.model_extra == {"somebody_elses": "meridian_exit"}


@pytest.mark.parametrize("place", ["outer", "inner"])
@pytest.mark.parametrize("model", MODELS)
def test_true_is_no_number(model, place):
    """vLLM makes 1 of it in `vllm_xargs`."""
    assert model(**MODELS[model], vllm_xargs={"meridian_priority": True}).vllm_xargs == {
        "meridian_priority": 1
    }
    ours = {"meridian_priority": True}
    request = served(model, **(ours if place == "outer" else {"vllm_xargs": ours}))
    with pytest.raises(ConfigError, match="field meridian_priority is True, expected a valid int"):
        parse_options(request.vllm_xargs)


@pytest.mark.parametrize("model", MODELS)
def test_a_field_in_both_places_is_refused(model):
    """By name; which of the two counts would be a guess."""
    with pytest.raises(VLLMClientError, match="field meridian_priority is at the top level of"):
        served(model, vllm_xargs={"meridian_priority": 1}, meridian_priority=1)


def test_each_conversation_of_a_batch_has_the_fields():
    """The model of a batch does not know `vllm_xargs`, and hands unknown fields on."""
    xargs = {"meridian_priority": 3}
    request = BatchChatCompletionRequest(
        messages=[MESSAGES], vllm_xargs=xargs, meridian_exit="observe"
    )
    move_fields(request)
    single = request.to_chat_completion_request(MESSAGES)
    assert single.vllm_xargs == {"meridian_priority": 3, "meridian_exit": "observe"}
    assert "meridian_exit" not in (single.model_extra or {})


def test_a_chat_request_made_of_another_body_has_its_fields():
    """As of `/v1/messages`, whose model drops what it does not know."""
    request = ChatCompletionRequest(messages=MESSAGES, vllm_xargs={"meridian_priority": 1})
    body = {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": 9,
        "vllm_xargs": {"meridian_priority": 1},
        "meridian_exit": "observe",
    }
    asyncio.run(restore_fields(request, as_sent(body)))
    move_fields(request)
    assert request.vllm_xargs == {"meridian_priority": 1, "meridian_exit": "observe"}
