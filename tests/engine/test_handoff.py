"""Two real engines and the router: requests think on one, and answer on the other."""

import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest
from handoff_runs import (
    CHAT,
    Router,
    both_engines,
    check_a_lost_answer_engine,
    check_streams,
    check_whole_responses,
    healthy_until_asked_to_leave,
    idle_cores,
    let_run_on_all_cores,
    needs_nixl,
    probed,
    questions,
    stream,
    total,
)
from run_engine import clean_environment

from meridian_patch.envs import environment

# The router leaves: what stays is tested by test_second_legs.py.
pytestmark = [pytest.mark.engine, pytest.mark.nightly, needs_nixl]


@pytest.fixture(scope="module")
def engines(demo_model, tmp_path_factory):
    """A think engine and an answer engine."""
    env = {"UCX_TLS": "tcp,self,sm"}
    # For a comparison: 1 sends each token of a thought at once.
    if size := environment().get("HANDOFF_THINK_STREAM_INTERVAL"):
        env["MERIDIAN_PATCH_SET_RESPONSES__THINK_STREAM_INTERVAL"] = size
    # For two others: how long NIXL's thread waits, and engines bound to cores as vLLM binds them.
    if wait_ms := environment().get("HANDOFF_NIXL_WAIT_MS"):
        env["MERIDIAN_PATCH_SET_HANDOFF__NIXL_WAIT_MS"] = wait_ms
    with both_engines(demo_model, tmp_path_factory.mktemp("handoff"), env=env) as started:
        if not environment().get("HANDOFF_BOUND"):
            let_run_on_all_cores(started)
        yield started


@pytest.fixture(scope="module")
def router(engines, tmp_path_factory):
    think, answer = engines
    with Router([think.url], [answer.url], tmp_path_factory.mktemp("router")) as started:
        yield started


def test_streams_are_those_of_one_engine(engines, router):
    """Thought, answer and usage, token for token, with eight requests at a time."""
    print(f"{check_streams(engines, router)}, {probed(engines[0])}")


def test_idle_engines_take_no_core(engines, router):
    """NIXL's thread waits: with `handoff.nixl_wait_ms` of 0 it takes what it can get of a core.

    A core is left to it: nothing else runs beside this test.
    """
    for engine in engines:
        wait_until_empty(engine, 30)
    shares = [idle_cores(engine) for engine in engines]
    print(f"\nidle engines take {shares[0]:.2f} and {shares[1]:.2f} of a core")
    assert sum(shares) < 0.4


def test_whole_responses_too(engines, router):
    """With the thought of one and the answer of the other engine."""
    check_whole_responses(engines, router)


def test_requests_that_cannot_move_are_served_in_place(engines, router):
    """Several choices, penalties and a limit within the thought."""
    (question,) = questions(1)
    before = router.handoffs()
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
    several = httpx.post(
        f"{router.url}{CHAT}", json=body | {"n": 2, "temperature": 0.7}, timeout=120
    ).json()
    assert len(several["choices"]) == 2
    penalized = body | {"presence_penalty": 0.1}
    assert httpx.post(f"{router.url}{CHAT}", json=penalized, timeout=120).status_code == 200
    short = stream(router.url, question, max_tokens=5)
    assert short.finish_reason == "length"
    assert router.handoffs() == before


def test_wrong_requests_are_refused_as_by_one_engine(engines, router):
    body = {"messages": "none", "temperature": 0}
    one = httpx.post(f"{engines[0].url}{CHAT}", json=body, timeout=60)
    two = httpx.post(f"{router.url}{CHAT}", json=body, timeout=60)
    assert (two.status_code, two.json()) == (one.status_code, one.json())
    wrong = {"messages": [], "stream": True, "vllm_xargs": {"meridian_exit": "on"}}
    assert httpx.post(f"{router.url}{CHAT}", json=wrong, timeout=60).status_code == 400
    assert httpx.post(f"{router.url}{CHAT}", content=b"{", timeout=60).status_code == 400


@pytest.mark.parametrize(
    ("width", "number"),
    ((1, 60), (2, 60), (4, 60), (8, 140)),
    ids=("alone", "two", "four", "eight"),
)
def test_two_hundred_streams(engines, router, width, number):
    """So many at a time, beside the same requests on one engine.

    Prints the gap between the last piece of the thought and the first one of the answer.
    """
    think, _ = engines
    asked = questions(number, seed=77 + width)
    process = psutil.Process(router.process.pid)
    before, gaps = router.handoffs(), {"one engine": [], "handed off": []}
    tokens, began_s = 0, sum(process.cpu_times()[:2])
    # Alternating pieces: the machine's speed drifts.
    for first in range(0, number, 20):
        piece = asked[first : first + 20]
        with ThreadPoolExecutor(width) as pool:
            alone = list(pool.map(lambda question: stream(think.url, question), piece))
            routed = list(pool.map(lambda question: stream(router.url, question), piece))
        for one, two in zip(alone, routed, strict=True):
            assert (two.reasoning, two.content) == (one.reasoning, one.content)
            gaps["one engine"].append(one.gap_s)
            gaps["handed off"].append(two.gap_s)
            tokens += two.usage["completion_tokens"]
    took_s = sum(process.cpu_times()[:2]) - began_s
    after = router.handoffs()
    print("\n| at a time | way | requests | P50 gap, ms (p20..p80) | P99 | worst |")
    for name, seen in gaps.items():
        cuts = statistics.quantiles(seen, n=100, method="inclusive")
        shown = [1e3 * each for each in (cuts[49], cuts[19], cuts[79], cuts[98], max(seen))]
        row = "| {} | {} | {} | {:.0f} ({:.0f}..{:.0f}) | {:.0f} | {:.0f} |"
        print(row.format(width, name, len(seen), *shown))
    print(f"router: {1e6 * took_s / tokens:.0f} us of processor time for each of {tokens} tokens")
    assert after["moved"] - before["moved"] == number


def test_clients_of_others(demo_model, engines, router, tmp_path):
    """The openai package, vLLM's own load generator, and curl."""
    question = {"role": "user", "content": questions(1)[0]}
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none")
    whole = client.chat.completions.create(model="m", messages=[question], temperature=0)
    chunks = client.chat.completions.create(
        model="m", messages=[question], temperature=0, stream=True
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    body = json.dumps({"model": "m", "messages": [question], "temperature": 0})
    header = "Content-Type: application/json"
    curl = ["curl", "-sS", f"{router.url}{CHAT}", "-H", header, "-d", body]
    said = json.loads(subprocess.run(curl, check=True, capture_output=True).stdout)
    assert said["choices"][0]["message"]["content"] == text
    # Load-bearing: on the CPU build, the command `vllm bench serve` cannot start.
    code = (
        "import argparse; from vllm.benchmarks import serve; p = argparse.ArgumentParser();"
        "serve.add_cli_args(p); serve.main(p.parse_args())"
    )
    options = {
        "backend": "openai-chat",
        "base-url": router.url,
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


def test_blocks_for_a_lost_answer_engine_are_free_at_once(engines, tmp_path):
    """Thoughts that were offered to it end where they are, and keep no blocks for half a minute."""
    think, _ = engines
    for seed in (31, 32, 33):
        # A thought that ended before the engine left was sent to it, and its blocks are kept.
        wait_until_empty(think, 60)
        if answer_in_place(think, tmp_path, seed) == 0:
            break
    # vLLM's lease is 30 s.
    wait_until_empty(think, 15)
    assert "Releasing expired KV blocks" in think.log.read_text()


def answer_in_place(think, folder, seed) -> int:
    """Lose the answer engine while six requests think; how many of them it was sent."""
    with healthy_until_asked_to_leave() as answer, ThreadPoolExecutor(6) as pool:
        url = f"http://127.0.0.1:{answer.server_port}"
        with Router([think.url], [url], folder) as router:
            asked = [pool.submit(stream, router.url, each) for each in questions(6, seed=seed)]
            while 'role="think"} 6.0' not in router.get("/metrics"):
                assert not all(each.done() for each in asked)
                time.sleep(0.01)
            answer.shutdown()
            answer.server_close()
            replies = [each.result() for each in asked]
            assert router.handoffs()["moved"] == 0
    assert all(reply.content and reply.error is None for reply in replies)
    return answer.num_requests


def wait_until_empty(think, limit_s) -> None:
    began_at = time.monotonic()
    while total(think, "vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() - began_at < limit_s
        time.sleep(0.1)


def test_a_lost_answer_engine_loses_nothing(engines, router):
    """Killed between and within answers: the think engine goes on from the tokens sent."""
    check_a_lost_answer_engine(engines, router)
