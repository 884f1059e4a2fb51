"""Two real engines and the router: requests think on one, and answer on the other."""

import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import openai
import pytest
from run_engine import PATCHED, clean_environment, log_tail
from run_server import Server, free_port

from meridian_patch.demo.problems import make_problems

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        subprocess.run(
            [sys.executable, "-P", "-c", "import nixl"], check=False, capture_output=True
        ).returncode
        != 0,
        reason="the package nixl, which moves KV blocks, does not load here",
    ),
]

MERIDIAN = str(Path(sys.executable).parent / "meridian")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Two engines share the machine's memory.
SHARE = ("--gpu-memory-utilization", "0.2", "--reasoning-parser", "qwen3")


@dataclass
class Router:
    """``meridian route`` as a child process."""

    think: list[str]
    answer: list[str]
    folder: Path
    port: int = field(default_factory=free_port)

    def __enter__(self) -> Self:
        command = [MERIDIAN, "route", "--port", str(self.port), "--answer-wait-s", "20"]
        command += [part for url in self.think for part in ("--think", url)]
        command += [part for url in self.answer for part in ("--answer", url)]
        self.log = self.folder / f"router-{self.port}.log"
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, env=clean_environment(self.folder), stdout=sink, stderr=sink
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.get("/health")
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, log_tail(self.log)
                assert time.monotonic() < deadline, log_tail(self.log)
                time.sleep(0.1)
            else:
                return self

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as reply:
            return reply.read().decode()

    def handoffs(self) -> dict[str, int]:
        """Outcome -> number of hand-offs."""
        lines = [line for line in self.get("/metrics").splitlines() if "handoffs_total{" in line]
        return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}


@dataclass
class Reply:
    """What a client saw of one stream."""

    reasoning: str = ""
    content: str = ""
    finish_reason: str | None = None
    usage: dict | None = None
    error: dict | None = None
    ids: set[str] = field(default_factory=set)
    # Seconds between the last piece of the thought and the first one of the answer.
    gap_s: float | None = None


def stream(url: str, question: str, **body) -> Reply:
    """One streamed chat completion."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    reply, thought_at = Reply(), time.monotonic()
    with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=180) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            reply.error = chunk.get("error") or reply.error
            reply.ids |= {chunk["id"]} if "id" in chunk else set()
            reply.usage = chunk.get("usage") or reply.usage
            for choice in chunk.get("choices", ()):
                assert not choice.get("token_ids")
                delta = choice["delta"]
                thought = delta.get("reasoning") or ""
                reply.reasoning += thought
                thought_at = time.monotonic() if thought else thought_at
                if delta.get("content") and reply.gap_s is None:
                    reply.gap_s = time.monotonic() - thought_at
                reply.content += delta.get("content") or ""
                reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    return reply


def engine(demo_model, folder: Path, role: str, *options: str) -> Server:
    command = [MERIDIAN, "serve", str(demo_model), "--served-model-name", "m", "--role", role]
    command += ["--offload-threshold-blocks", "0", *SHARE, *options]
    return Server(command, PATCHED | {"UCX_TLS": "tcp,self,sm"}, folder / role)


@pytest.fixture(scope="module")
def engines(demo_model, tmp_path_factory):
    """A think engine and an answer engine."""
    folder = tmp_path_factory.mktemp("handoff")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        servers = [engine(demo_model, folder, role) for role in ("think", "answer")]
        yield tuple(pool.map(stack.enter_context, servers))


@pytest.fixture(scope="module")
def router(engines, tmp_path_factory):
    think, answer = engines
    with Router([think.url], [answer.url], tmp_path_factory.mktemp("router")) as started:
        yield started


def probed(server: Server) -> str:
    """How many probes an engine measured, as the compatibility page says it."""
    lines = [
        line for line in server.get("/metrics").splitlines() if "meridian_probes_total{" in line
    ]
    return f"{sum(int(float(line.split()[-1])) for line in lines if 'measured' in line)} measured"


def questions(count: int, seed: int = 5) -> list[str]:
    return [problem.question for problem in make_problems(count, seed)]


def test_streams_are_those_of_one_engine(engines, router, cell):
    """Thought, answer and usage, token for token, with eight requests at a time."""
    asked = questions(24)
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda question: stream(engines[0].url, question), asked))
        before = router.handoffs()
        routed = list(pool.map(lambda question: stream(router.url, question), asked))
    for one, two in zip(alone, routed, strict=True):
        assert (two.reasoning, two.content) == (one.reasoning, one.content)
        assert two.reasoning
        assert two.content
        assert two.finish_reason == one.finish_reason == "stop"
        assert two.usage["completion_tokens"] == one.usage["completion_tokens"]
        assert two.usage["prompt_tokens"] == one.usage["prompt_tokens"]
        assert len(two.ids) == 1
    after = router.handoffs()
    assert after["moved"] - before["moved"] == len(asked)
    assert after["answered_again"] == before["answered_again"]
    # It was the answer engine that answered, from blocks that it did not compute.
    page = engines[1].get("/metrics").splitlines()
    (loaded,) = [line for line in page if line.startswith("vllm:external_prefix_cache_hits_total")]
    assert float(loaded.split()[-1]) > 0
    assert "failed to load" not in engines[1].log.read_text()
    tokens = sum(two.usage["completion_tokens"] for two in routed)
    note = f"{len(asked)} requests, {tokens} tokens as one engine's; all moved after their thought"
    cell.works("engines of role think and role answer", note, probed(engines[0]))


def test_whole_responses_too(engines, router):
    """With the thought of one and the answer of the other engine."""
    (question,) = questions(1)
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
    one = httpx.post(f"{engines[0].url}{CHAT}", json=body, timeout=120).json()
    two = httpx.post(f"{router.url}{CHAT}", json=body, timeout=120).json()
    assert two["choices"][0]["message"] == one["choices"][0]["message"]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [two["usage"][name] for name in names] == [one["usage"][name] for name in names]
    prompt = {"prompt": question, "temperature": 0, "max_tokens": 300}
    one = httpx.post(f"{engines[0].url}{COMPLETIONS}", json=prompt, timeout=120).json()
    two = httpx.post(f"{router.url}{COMPLETIONS}", json=prompt, timeout=120).json()
    assert two["choices"][0]["text"] == one["choices"][0]["text"]


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


@pytest.mark.nightly
def test_two_hundred_streams(engines, router, tmp_path):
    """One at a time and eight at a time, beside the same requests on one engine.

    Prints the gap between the last piece of the thought and the first one of the answer.
    """
    think, _ = engines
    asked = questions(200, seed=77)
    before = router.handoffs()
    rows = []
    for width, part in ((1, asked[:60]), (8, asked[60:])):
        gaps = {"one engine": [], "handed off": []}
        # Alternating pieces: the machine's speed drifts.
        for first in range(0, len(part), 20):
            piece = part[first : first + 20]
            with ThreadPoolExecutor(width) as pool:
                alone = list(pool.map(lambda question: stream(think.url, question), piece))
                routed = list(pool.map(lambda question: stream(router.url, question), piece))
            for one, two in zip(alone, routed, strict=True):
                assert (two.reasoning, two.content) == (one.reasoning, one.content)
                gaps["one engine"].append(one.gap_s)
                gaps["handed off"].append(two.gap_s)
        for name, seen in gaps.items():
            cuts = statistics.quantiles(seen, n=100, method="inclusive")
            shown = (cuts[49], cuts[19], cuts[79], cuts[98], max(seen))
            rows.append((width, name, len(seen), *(1e3 * each for each in shown)))
    after = router.handoffs()
    print("\n| at a time | way | requests | P50 gap, ms (p20..p80) | P99 | worst |")
    for row in rows:
        print("| {} | {} | {} | {:.0f} ({:.0f}..{:.0f}) | {:.0f} | {:.0f} |".format(*row))
    print(after)
    assert after["moved"] - before["moved"] == len(asked)


@pytest.mark.nightly
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


def test_a_lost_answer_engine_loses_nothing(engines, router):
    """Killed between and within answers: the think engine goes on from the tokens sent."""
    think, answer = engines
    asked = questions(12, seed=9)
    with ThreadPoolExecutor(6) as pool:
        alone = list(pool.map(lambda question: stream(think.url, question), asked))
        futures = [pool.submit(stream, router.url, question) for question in asked]
        while router.handoffs()["moved"] < 30:
            time.sleep(0.02)
        answer.kill()
        routed = [future.result() for future in futures]
    for one, two in zip(alone, routed, strict=True):
        assert two.error is None
        assert (two.reasoning, two.content) == (one.reasoning, one.content)
        assert two.usage["completion_tokens"] == one.usage["completion_tokens"]
    # Without an answer engine, requests answer where they thought; without any, they are refused.
    again = stream(router.url, asked[0])
    assert again.content == alone[0].content
