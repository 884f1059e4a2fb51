"""Two real engines: requests think at the server that clients ask, and answer at the other one."""

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anthropic
import httpx
import openai
import psutil
import pytest
from handoff_runs import (
    CHAT,
    MERIDIAN,
    both_engines,
    check_a_lost_answer_engine,
    check_streams,
    handoffs,
    idle_cores,
    let_run_on_all_cores,
    needs_nixl,
    probed,
    questions,
    stream,
    wait_until_empty,
)
from run_engine import clean_environment
from run_server import Server, free_port

from meridian_patch.envs import environment

pytestmark = [pytest.mark.engine, needs_nixl]


@pytest.fixture(scope="module")
def engines(demo_model, tmp_path_factory):
    """A think server and its answer engine."""
    env = {"UCX_TLS": "tcp,self,sm"}
    # For a comparison: 1 sends each token of a thought at once.
    if size := environment().get("HANDOFF_THINK_STREAM_INTERVAL"):
        env["MERIDIAN_PATCH_SET_RESPONSES__THINK_STREAM_INTERVAL"] = size
    # For two others: how long NIXL's thread waits, and engines bound to cores as vLLM binds them.
    if wait_ms := environment().get("HANDOFF_NIXL_WAIT_MS"):
        env["MERIDIAN_PATCH_SET_HANDOFF__NIXL_WAIT_MS"] = wait_ms
    # A call that a request names is made by grammar; the parser is what vLLM asks for.
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with both_engines(demo_model, tmp_path_factory.mktemp("legs"), *tools, env=env) as started:
        if not environment().get("HANDOFF_BOUND"):
            let_run_on_all_cores(started)
        yield started


def test_streams_are_those_of_one_engine(engines, cell):
    """Thought, answer and usage, token for token, eight at a time."""
    note = check_streams(engines)
    cell.works("engines of role think and role answer", note, probed(engines[0]))


@pytest.mark.nightly
def test_idle_engines_take_no_core(engines):
    """NIXL's thread waits: with `handoff.nixl_wait_ms` of 0 it takes what it can get of a core.

    A core is left to it: nothing else runs beside this test.
    """
    for each in engines:
        wait_until_empty(each, 30)
    shares = [idle_cores(each) for each in engines]
    print(f"\nidle engines take {shares[0]:.2f} and {shares[1]:.2f} of a core")
    assert sum(shares) < 0.4


BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "{}"}]},
    f"{CHAT} with log-probabilities": {
        "messages": [{"role": "user", "content": "{}"}],
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/completions": {"prompt": "{}", "max_tokens": 300},
    "/v1/responses": {"input": "{}", "max_output_tokens": 400},
    "/v1/messages": {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 400},
}
OWN = ("id", "created", "created_at", "completed_at", "system_fingerprint", "signature")


def plain(value):
    """A response without what differs between two responses of one server."""
    if isinstance(value, dict):
        named = {name: each for name, each in value.items() if not name.endswith("_ms")}
        return {name: plain(each) for name, each in named.items() if name not in OWN}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("name", BODIES)
def test_every_endpoint_moves(engines, name):
    """A whole response is that of one engine, field for field."""
    think, answer = engines
    (question,) = questions(1, seed=11)
    body = json.loads(json.dumps(BODIES[name]).replace("{}", question))
    body |= {"temperature": 0, "model": "m"}
    path = name.split(" ")[0]
    before = handoffs(think, "moved")
    one, two = (
        httpx.post(f"{server.url}{path}", json=body, timeout=120) for server in (answer, think)
    )
    assert one.status_code == two.status_code == 200, (one.text, two.text)
    assert handoffs(think, "moved") == before + (0 if path == "/v1/completions" else 1)
    assert plain(two.json()) == plain(one.json())


def test_choices_move_each(engines):
    think, _ = engines
    before = handoffs(think, "moved")
    body = {"messages": [{"role": "user", "content": questions(1)[0]}], "temperature": 0.5, "n": 2}
    reply = httpx.post(f"{think.url}{CHAT}", json=body, timeout=120).json()
    assert all(choice["message"]["content"] for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] > 40
    assert handoffs(think, "moved") == before + 2


def test_a_grammar_begins_with_the_answer(engines):
    think, answer = engines
    body = {
        "messages": [{"role": "user", "content": questions(1)[0]}],
        "temperature": 0,
        "structured_outputs": {"regex": "[0-9] it is, and nothing else\\."},
    }
    before = handoffs(think, "moved")
    one, two = (
        httpx.post(f"{server.url}{CHAT}", json=body, timeout=120).json()
        for server in (answer, think)
    )
    assert two["choices"][0]["message"] == one["choices"][0]["message"]
    assert two["choices"][0]["message"]["content"].endswith("it is, and nothing else.")
    assert handoffs(think, "moved") == before + 1


def test_what_cannot_travel_answers_where_it_thought(engines):
    think, _ = engines
    moved, stays = handoffs(think, "moved"), handoffs(think, "penalties")
    body = {"messages": [{"role": "user", "content": questions(1)[0]}], "temperature": 0}
    body |= {"presence_penalty": 0.1, "kv_transfer_params": {"do_remote_prefill": True}}
    reply = httpx.post(f"{think.url}{CHAT}", json=body, timeout=120).json()
    assert reply["choices"][0]["message"]["content"]
    assert handoffs(think, "moved") == moved
    assert handoffs(think, "penalties") == stays + 1


def test_a_client_that_leaves_frees_both_sides(engines):
    think = engines[0]
    body = {"messages": [{"role": "user", "content": questions(1)[0]}], "stream": True}
    body |= {"min_tokens": 600, "max_tokens": 900, "temperature": 0}
    with httpx.stream("POST", f"{think.url}{CHAT}", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                break
    for server in engines:
        wait_until_empty(server, 40)


# Load-bearing: vLLM binds the schema of a strict tool only, so the arguments are any JSON value.
REPORT = {"type": "function", "function": {"name": "report", "parameters": {"type": "object"}}}


def test_streamed_tool_calls_move(engines):
    """The openai package collects the same call from both servers."""
    think, answer = engines
    before = handoffs(think, "moved")
    calls = []
    for server in (answer, think):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        with client.chat.completions.stream(
            model="m",
            messages=[{"role": "user", "content": questions(1, seed=13)[0]}],
            tools=[REPORT],
            tool_choice={"type": "function", "function": {"name": "report"}},
            temperature=0,
        ) as events:
            message = events.get_final_completion().choices[0].message
        calls.append([(each.function.name, each.function.arguments) for each in message.tool_calls])
    assert calls[0] == calls[1]
    ((name, arguments),) = calls[1]
    assert name == "report"
    json.loads(arguments)
    assert handoffs(think, "moved") == before + 1


def stream_message(url: str, question: str) -> dict:
    """What the anthropic package makes of a streamed message."""
    client = anthropic.Anthropic(base_url=url, api_key="none")
    with client.messages.stream(
        model="m",
        max_tokens=400,
        messages=[{"role": "user", "content": question}],
        extra_body={"temperature": 0},
    ) as events:
        return events.get_final_message().model_dump()


def test_the_anthropic_package_sees_one_server(engines):
    """Blocks of thought and text, stop reason and usage of a streamed message."""
    think, answer = engines
    before = handoffs(think, "moved")
    (question,) = questions(1, seed=17)
    one, two = (stream_message(server.url, question) for server in (answer, think))
    assert plain(one) == plain(two)
    assert [block["type"] for block in two["content"]] == ["thinking", "text"]
    assert handoffs(think, "moved") == before + 1


def stream_response(url: str, question: str) -> dict:
    """What the openai package makes of a streamed response."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    with client.responses.stream(
        model="m", input=question, max_output_tokens=400, temperature=0
    ) as events:
        return events.get_final_response().model_dump()


def stream_completion(url: str, question: str) -> list:
    """Text, finish reason and usage of a streamed completion of the model's own template."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    chunks = list(
        client.completions.create(
            model="m",
            prompt=f"<|user|>{question}<|end|><|assistant|><think>\n",
            max_tokens=400,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    usage = chunks[-1].usage
    assert usage is not None
    return ["".join(one.text for one in choices), choices[-1].finish_reason, usage.model_dump()]


@pytest.mark.nightly
# Questions of their own: what both caches hold of earlier ones differs, and usage says so.
@pytest.mark.parametrize(
    ("ask", "seed"), [(stream_message, 19), (stream_response, 20), (stream_completion, 21)]
)
def test_two_hundred_streams_of_other_endpoints(engines, ask, seed):
    """Eight at a time, each as one engine alone streams it; those of chat are below."""
    think, answer = engines
    before, asked = handoffs(think, "moved"), questions(200, seed=seed)
    with ThreadPoolExecutor(8) as pool:
        one, two = (list(pool.map(partial(ask, server.url), asked)) for server in (answer, think))
    assert [plain(each) for each in two] == [plain(each) for each in one]
    # The others answered at home: on a machine that stalls, the answer engine is slow at times.
    assert handoffs(think, "moved") > before + 150


@pytest.mark.nightly
def test_clients_of_others(demo_model, engines, tmp_path):
    """The openai package, vLLM's own load generator, and curl."""
    url = engines[0].url
    question = {"role": "user", "content": questions(1)[0]}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    whole = client.chat.completions.create(model="m", messages=[question], temperature=0)
    chunks = client.chat.completions.create(
        model="m", messages=[question], temperature=0, stream=True
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    body = json.dumps({"model": "m", "messages": [question], "temperature": 0})
    header = "Content-Type: application/json"
    curl = ["curl", "-sS", f"{url}{CHAT}", "-H", header, "-d", body]
    said = json.loads(subprocess.run(curl, check=True, capture_output=True).stdout)
    assert said["choices"][0]["message"]["content"] == text
    # Load-bearing: on the CPU build, the command `vllm bench serve` cannot start.
    code = (
        "import argparse; from vllm.benchmarks import serve; p = argparse.ArgumentParser();"
        "serve.add_cli_args(p); serve.main(p.parse_args())"
    )
    options = {
        "backend": "openai-chat",
        "base-url": url,
        "endpoint": CHAT,
        "model": "m",
        "tokenizer": str(demo_model),
        "dataset-name": "random",
        "random-input-len": "40",
        "random-output-len": "120",
        "num-prompts": "40",
        "max-concurrency": "8",
        "result-filename": str(tmp_path / "bench.json"),
    }
    command = [sys.executable, "-P", "-c", code, "--save-result"]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    subprocess.run(command, check=True, timeout=300, env=clean_environment(tmp_path))
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["completed"] == 40


@pytest.mark.nightly
@pytest.mark.parametrize(("width", "number"), [(1, 40), (2, 40), (4, 40), (8, 80)])
def test_two_hundred_streams(engines, width, number):
    """So many at a time, beside the same requests on one engine.

    Prints the gap between the last piece of the thought and the first one of the answer, and what
    the API servers take.
    """
    think, answer = engines
    asked = questions(number, seed=77 + width)
    before = handoffs(think, "moved")
    gaps, cpu_s, tokens = defaultdict(list), defaultdict(float), 0
    # Alternating pieces: the machine's speed drifts.
    for first in range(0, number, 20):
        replies = {}
        for name, server in (("one engine", answer), ("moved", think)):
            began_s = taken_s(engines)
            with ThreadPoolExecutor(width) as pool:
                piece = asked[first : first + 20]
                replies[name] = list(pool.map(partial(stream, server.url), piece))
            cpu_s[name] += taken_s(engines) - began_s
            gaps[name] += [1e3 * each.gap_s for each in replies[name]]
        for one, two in zip(*replies.values(), strict=True):
            assert (two.reasoning, two.content) == (one.reasoning, one.content)
            tokens += two.usage["completion_tokens"]
    assert handoffs(think, "moved") - before == number
    for name, seen in gaps.items():
        cuts = statistics.quantiles(seen, n=100, method="inclusive")
        shown = (
            f"{cuts[49]:.0f} ({cuts[19]:.0f}..{cuts[79]:.0f}) | {cuts[98]:.0f} | {max(seen):.0f}"
        )
        print(
            f"\n| {width} | {name} | {number} | {shown} | {1e6 * cpu_s[name] / tokens:.0f} |",
            end="",
        )


def taken_s(engines) -> float:
    """Processor time that the API servers have taken."""
    times = [psutil.Process(server.pid).cpu_times() for server in engines]
    return sum(each.user + each.system for each in times)


def doctor(server: Server, *options: str) -> dict[str, tuple[str, str]]:
    """What ``meridian doctor`` finds of a hand-off, by what it looked at."""
    command = [MERIDIAN, "doctor", "--quick", "--json", "--url", server.url, *options]
    env = clean_environment(server.status_directory.parent)
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    areas = ("hand-off", "answer engine")
    told = [each for each in json.loads(done.stdout)["findings"] if each["area"].startswith(areas)]
    return {each["check"]: (each["state"], each["found"]) for each in told}


def test_the_doctor_finds_both_sides_in_order(engines):
    think, answer = engines
    found = doctor(think, "--answer", answer.url)
    assert {state for state, _ in found.values()} == {"ok"}, found
    assert found["connector"][1].startswith("NIXL")
    assert "counted moved 1" in found["one request"][1]
    assert "tokens of it" in found["KV cache"][1]
    assert found["role"][1].startswith("think")


def test_the_doctor_names_what_is_no_answer_engine(engines):
    """The think server has no token endpoint, and nothing listens at the other address."""
    think, _ = engines
    wrong = f"http://127.0.0.1:{free_port()}"
    found = doctor(think, "--answer", think.url, "--answer", wrong)
    assert found["token endpoint"] == ("fail", "not there")
    assert found["reachable"][0] == "fail"
    assert f"{wrong} cannot be reached" in found["reachable"][1]
    # Its own answer engine took the request.
    assert found["one request"][0] == "ok"
    assert found["KV cache"][0] == "warn"


def test_a_lost_answer_engine_loses_nothing(engines):
    """Killed between and within answers: the think server goes on from the tokens sent."""
    check_a_lost_answer_engine(engines)
    think = engines[0]
    (question,) = questions(1, seed=9)
    grammar = {"structured_outputs": {"regex": "[0-9] it is, and nothing else\\."}}
    again = stream(think.url, question, **grammar)
    assert again.content.endswith("it is, and nothing else.")
    # What was kept for the lost engine stays for vLLM's 30 s, and what no engine was asked for is
    # free at once.
    wait_until_empty(think, 45)
    assert stream(think.url, question).content
    wait_until_empty(think, 10)
