"""A real server on a scripted model: where thoughts begin and end, and what follows from it."""

import json
import sys

import pytest
from puppet import THINK, TURN_END, make_puppet, tool_call, words
from run_engine import PATCHED
from run_server import Server

pytestmark = pytest.mark.engine

# What stands behind `assistant` and its line break chooses the script.
PLAIN, UNCLOSED, ALOUD = "\n", " unclosed", " aloud"
SCRIPTS = [
    [THINK, *words("t", 30), *tool_call("look_up", city=words("c", 40)), TURN_END],
    [PLAIN, *words("a", 60), TURN_END],
    [UNCLOSED, *words("u", 61), TURN_END],
    [ALOUD, *words("p", 20), THINK],
]
CAP = {"meridian_exit": "enforce", "meridian_max_think_tokens": 45}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKS = "What does the <think> tag mean?"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("puppet")
    model = make_puppet(folder, "qwen3-puppet-thinking-2507", SCRIPTS)
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "m"]
    command += ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder"]
    command += ["--enable-auto-tool-choice"]
    with Server(command, PATCHED, folder) as started:
        yield started


def chat(server, **body) -> dict:
    return server.chat(ASKS, max_tokens=200, **body)


def reasoning(reply: dict) -> int:
    return reply["usage"]["completion_tokens_details"]["reasoning_tokens"]


def sampled(server, name: str, label: str) -> float:
    """A sample of /metrics, summed over engines."""
    lines = server.get("/metrics").splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


@pytest.mark.parametrize("fields", [{}, CAP], ids=["uncapped", "capped"])
def test_a_tool_call_ends_a_thought(server, fields):
    """30 tokens of thought, then a call, and no end marker: the call is whole, and an answer."""
    before = sampled(server, "meridian_output_tokens_total", 'phase="think"')
    reply = chat(server, tools=[TOOL], vllm_xargs=fields)
    (choice,) = reply["choices"]
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"].split() == "".join(words("c", 40)).split()
    assert choice["message"]["reasoning"] == "".join(words("t", 30))
    assert reasoning(reply) == 30
    assert choice["meridian"]["exit_reason"] == "natural"
    assert choice["meridian"]["think_tokens"] == 30
    assert sampled(server, "meridian_output_tokens_total", 'phase="think"') - before == 30


def test_a_cap_closes_the_thought_before_a_tool_call(server):
    """The twin: a cap within the thought ends it, and the puppet goes on behind the end marker."""
    reply = chat(server, tools=[TOOL], vllm_xargs=CAP | {"meridian_max_think_tokens": 20})
    (choice,) = reply["choices"]
    assert choice["meridian"]["exit_reason"] == "hard_cap"
    assert 20 <= reasoning(reply) < 30


def test_a_marker_in_the_users_words_opens_no_thought(server):
    """The assistant's turn begins plain: nothing is reasoning, and no cap closes the answer."""
    prompt = f"<|im_start|>user\n{ASKS}{TURN_END}\n<|im_start|>assistant\n"
    body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "vllm_xargs": CAP}
    status, text = server.post("/v1/completions", body)
    assert status == 200, text
    reply = json.loads(text)
    (choice,) = reply["choices"]
    assert choice["text"] == "".join(words("a", 60))
    assert reasoning(reply) == 0
    assert "exit_reason" not in choice.get("meridian", {})


def test_the_end_of_sequence_is_no_part_of_a_thought(server):
    """A thought that never closes: its tokens count, the one that ends the request does not."""
    reply = chat(server, chat_template_kwargs={"opens": THINK + UNCLOSED})
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 62
    assert reasoning(reply) == 61


def test_text_before_a_thought_that_the_model_opens_is_reasoning(server):
    """To the parser, and so to clients: 20 tokens before the marker and 30 behind it."""
    reply = chat(server, tools=[TOOL], chat_template_kwargs={"opens": ALOUD})
    (choice,) = reply["choices"]
    assert choice["message"]["reasoning"] == "".join((*words("p", 20), *words("t", 30)))
    assert reasoning(reply) == 50
