"""Two real engines: requests think at the server that clients ask, and answer at the other one."""

import json
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import httpx
import psutil
import pytest
from handoff_runs import (
    CHAT,
    LOAD_FAILURE,
    LOADED,
    engine,
    let_run_on_all_cores,
    needs_nixl,
    probed,
    questions,
    stream,
    total,
)
from run_server import Server

pytestmark = [pytest.mark.engine, needs_nixl]

ENV = {"UCX_TLS": "tcp,self,sm"}


@pytest.fixture(scope="module")
def engines(demo_model, tmp_path_factory):
    """A think server that knows its answer engine, and that engine, started at the same time."""
    folder = tmp_path_factory.mktemp("legs")
    answer = engine(demo_model, folder, "answer", env=ENV)
    think = engine(demo_model, folder, "think", "--answer", answer.url, env=ENV)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        started = tuple(pool.map(stack.enter_context, (think, answer)))
        let_run_on_all_cores(started)
        yield started


def count(server: Server, outcome: str) -> int:
    lines = server.get("/metrics").splitlines()
    wanted = [line for line in lines if line.startswith("meridian_handoff") and "_total{" in line]
    return sum(int(float(line.split()[-1])) for line in wanted if f'"{outcome}"}}' in line)


def test_streams_are_those_of_one_engine(engines, cell):
    """Thought, answer and usage, token for token, eight at a time."""
    think, answer = engines
    asked = questions(24)
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda question: stream(answer.url, question), asked))
        before, loaded = count(think, "moved"), total(answer, LOADED)
        moved = list(pool.map(lambda question: stream(think.url, question), asked))
    for one, two in zip(alone, moved, strict=True):
        assert (two.reasoning, two.content) == (one.reasoning, one.content)
        assert two.reasoning
        assert two.content
        assert two.finish_reason == one.finish_reason == "stop"
        assert two.usage == one.usage
        assert len(two.ids) == 1
    assert count(think, "moved") - before == len(asked)
    assert count(think, "answered_at_home") == 0
    # It was the answer engine that answered, from blocks that it did not compute.
    assert total(answer, LOADED) > loaded
    assert LOAD_FAILURE not in answer.log.read_text()
    gaps = sorted(two.gap_s for two in moved)
    print(f"\ngap: median {1e3 * gaps[12]:.0f} ms, worst {1e3 * gaps[-1]:.0f} ms")
    tokens = sum(two.usage["completion_tokens"] for two in moved)
    note = f"{len(asked)} requests, {tokens} tokens as one engine's; all moved after their thought"
    cell.works("engines of role think and role answer", note, probed(think))


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
    before = count(think, "moved")
    one, two = (
        httpx.post(f"{server.url}{path}", json=body, timeout=120) for server in (answer, think)
    )
    assert one.status_code == two.status_code == 200, (one.text, two.text)
    assert count(think, "moved") == before + (0 if path == "/v1/completions" else 1)
    assert plain(two.json()) == plain(one.json())


def test_choices_move_each(engines):
    think, _ = engines
    before = count(think, "moved")
    body = {"messages": [{"role": "user", "content": questions(1)[0]}], "temperature": 0.5, "n": 2}
    reply = httpx.post(f"{think.url}{CHAT}", json=body, timeout=120).json()
    assert all(choice["message"]["content"] for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] > 40
    assert count(think, "moved") == before + 2


def test_a_grammar_begins_with_the_answer(engines):
    think, answer = engines
    body = {
        "messages": [{"role": "user", "content": questions(1)[0]}],
        "temperature": 0,
        "structured_outputs": {"regex": "[0-9] it is, and nothing else\\."},
    }
    before = count(think, "moved")
    one, two = (
        httpx.post(f"{server.url}{CHAT}", json=body, timeout=120).json()
        for server in (answer, think)
    )
    assert two["choices"][0]["message"] == one["choices"][0]["message"]
    assert two["choices"][0]["message"]["content"].endswith("it is, and nothing else.")
    assert count(think, "moved") == before + 1


def test_what_cannot_travel_answers_where_it_thought(engines):
    think, _ = engines
    moved, stays = count(think, "moved"), count(think, "penalties")
    body = {"messages": [{"role": "user", "content": questions(1)[0]}], "temperature": 0}
    body |= {"presence_penalty": 0.1, "kv_transfer_params": {"do_remote_prefill": True}}
    reply = httpx.post(f"{think.url}{CHAT}", json=body, timeout=120).json()
    assert reply["choices"][0]["message"]["content"]
    assert count(think, "moved") == moved
    assert count(think, "penalties") == stays + 1


def wait_until_empty(server: Server, limit_s: float) -> None:
    began_at = time.monotonic()
    while total(server, "vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() - began_at < limit_s
        time.sleep(0.1)


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


@pytest.mark.nightly
@pytest.mark.parametrize(("width", "number"), [(1, 40), (2, 40), (4, 40), (8, 80)])
def test_two_hundred_streams(engines, width, number):
    """So many at a time, beside the same requests on one engine.

    Prints the gap between the last piece of the thought and the first one of the answer, and what
    the API servers take.
    """
    think, answer = engines
    asked = questions(number, seed=77 + width)
    before = count(think, "moved")
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
    assert count(think, "moved") - before == number
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


def test_a_lost_answer_engine_loses_nothing(engines):
    """Killed between and within answers: the think server goes on from the tokens sent."""
    think, answer = engines
    asked = questions(12, seed=9)
    with ThreadPoolExecutor(6) as pool:
        alone = list(pool.map(lambda question: stream(answer.url, question), asked))
        start = count(think, "moved")
        futures = [pool.submit(stream, think.url, question) for question in asked]
        while count(think, "moved") < start + 4:
            time.sleep(0.02)
        answer.kill()
        moved = [future.result() for future in futures]
    for one, two in zip(alone, moved, strict=True):
        assert two.error is None
        assert (two.reasoning, two.content) == (one.reasoning, one.content)
        assert two.usage == one.usage
    assert count(think, "answered_at_home") > 0
    grammar = {"structured_outputs": {"regex": "[0-9] it is, and nothing else\\."}}
    again = stream(think.url, asked[0], **grammar)
    assert again.content.endswith("it is, and nothing else.")
