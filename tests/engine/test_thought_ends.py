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


def serving(folder, name: str, parser: str) -> Server:
    model = make_puppet(folder, name, SCRIPTS)
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "m"]
    command += ["--reasoning-parser", parser, "--tool-call-parser", "qwen3_coder"]
    command += ["--enable-auto-tool-choice"]
    return Server(command, PATCHED, folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("q"), "qwen3-puppet-thinking-2507", "qwen3") as started:
        yield started


@pytest.fixture(scope="module")
def server_of_unnamed_turns(tmp_path_factory):
    """Neither family nor parser knows how a turn begins; one of the puppet's tokens is a line."""
    with serving(tmp_path_factory.mktemp("s"), "step3-puppet", "step3") as started:
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


@pytest.mark.parametrize(
    "name", ["server", pytest.param("server_of_unnamed_turns", marks=pytest.mark.nightly)]
)
def test_a_marker_in_the_users_words_opens_no_thought(name, request):
    """The assistant's turn begins plain: nothing is reasoning, and no cap closes the answer."""
    server = request.getfixturevalue(name)
    prompt = f"<|im_start|>user\n{ASKS}{TURN_END}\n<|im_start|>assistant\n"
    body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "vllm_xargs": CAP}
    status, text = server.post("/v1/completions", body)
    assert status == 200, text
    reply = json.loads(text)
    (choice,) = reply["choices"]
    assert choice["text"] == "".join(words("a", 60))
    assert reasoning(reply) == 0
    assert "exit_reason" not in choice.get("meridian", {})
    # A thought that the prompt opens is one all the same.
    reply = chat(server, vllm_xargs=CAP | {"meridian_max_think_tokens": 20})
    assert reply["choices"][0]["meridian"]["exit_reason"] == "hard_cap"
    assert 20 <= reasoning(reply) < 30


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
