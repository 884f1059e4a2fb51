"""Two engines and the router: their processes, what a client sees of a stream, and questions."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import pytest
from run_engine import PATCHED, clean_environment, log_tail
from run_server import Server, free_port

from meridian_patch.demo.problems import make_problems

MERIDIAN = str(Path(sys.executable).parent / "meridian")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Two engines share the machine's memory. All requests that run have room: a wait for blocks would
# count as a part of the hand-off.
SHARE = (
    *("--gpu-memory-utilization", "0.2", "--reasoning-parser", "qwen3"),
    *("--num-gpu-blocks-override", "257"),
)
# Tokens that an engine did not compute, because its connector brought their blocks.
LOADED = "vllm:external_prefix_cache_hits_total"
# Load-bearing: what vLLM's scheduler logs if they do not arrive. They count as brought even so.
LOAD_FAILURE = "KV load failure"


needs_nixl = pytest.mark.skipif(
    subprocess.run(
        [sys.executable, "-P", "-c", "import nixl"], check=False, capture_output=True
    ).returncode
    != 0,
    reason="the package nixl, which moves KV blocks, does not load here",
)


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


def engine(
    demo_model, folder: Path, role: str, *options: str, env: dict[str, str] | None = None
) -> Server:
    """``meridian serve --role``.

    Args:
        demo_model: the tiny reasoner.
        folder: takes a folder with the name of the role.
        role: think or answer.
        options: of ``meridian serve``.
        env: added to the environment.
    """
    command = [MERIDIAN, "serve", str(demo_model), "--served-model-name", "m", "--role", role]
    command += ["--offload-threshold-blocks", "0", *SHARE, *options]
    return Server(command, PATCHED | (env or {}), folder / role)


class _Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.server.num_requests += 1
        self.send_error(503)

    def log_message(self, *_) -> None:
        """Says nothing."""


@contextmanager
def healthy_until_asked_to_leave():
    """An answer engine that is healthy and serves no request; yields it, to be shut down."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Healthy)
    server.num_requests = 0
    # It leaves within this many seconds, so that no thought that ends meanwhile is sent to it.
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    serving.start()
    try:
        yield server
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@contextmanager
def both_engines(demo_model, folder: Path, *options: str, env: dict[str, str]):
    """A think engine and an answer engine, started at the same time."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        servers = [
            engine(demo_model, folder, role, *options, env=env) for role in ("think", "answer")
        ]
        yield tuple(pool.map(stack.enter_context, servers))


def let_run_on_all_cores(engines: tuple[Server, ...]) -> None:
    """Undo what vLLM's NIXL connector does on a CPU.

    Load-bearing: its worker binds the process's main thread, here EngineCore's, and so the threads
    that start later, to the machine's last core. Both engines of a machine then share it, and leave
    the other cores to the rest.
    """
    cores = os.sched_getaffinity(0)
    for engine in engines:
        for process in engine.processes():
            for thread in process.threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores)


def idle_cores(server: Server, seconds: float = 2.0) -> float:
    """Processor cores that a server without requests takes."""
    processes = server.processes()

    def taken_s() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in processes)

    began_s, began = taken_s(), time.monotonic()
    time.sleep(seconds)
    return (taken_s() - began_s) / (time.monotonic() - began)


def probed(server: Server) -> str:
    """How many probes an engine measured, as the compatibility page says it."""
    lines = [
        line for line in server.get("/metrics").splitlines() if "meridian_probes_total{" in line
    ]
    return f"{sum(int(float(line.split()[-1])) for line in lines if 'measured' in line)} measured"


def questions(count: int, seed: int = 5) -> list[str]:
    return [problem.question for problem in make_problems(count, seed)]


def total(server: Server, metric: str) -> float:
    """The sum of a counter over its labels."""
    lines = server.get("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric))


def check_streams(engines, router: Router) -> str:
    """Thought, answer and usage of 24 streams, token for token, with eight at a time.

    Returns:
        What was shown, as the compatibility page says it.
    """
    think, answer = engines
    asked = questions(24)
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda question: stream(think.url, question), asked))
        before, loaded = router.handoffs(), total(answer, LOADED)
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
    assert total(answer, LOADED) > loaded
    assert LOAD_FAILURE not in answer.log.read_text()
    tokens = sum(two.usage["completion_tokens"] for two in routed)
    return f"{len(asked)} requests, {tokens} tokens as one engine's; all moved after their thought"


def check_whole_responses(engines, router: Router) -> None:
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


def check_a_lost_answer_engine(engines, router: Router) -> None:
    """Killed between and within answers: the think engine goes on from the tokens sent."""
    think, answer = engines
    asked = questions(12, seed=9)
    start = router.handoffs()["moved"]
    with ThreadPoolExecutor(6) as pool:
        alone = list(pool.map(lambda question: stream(think.url, question), asked))
        futures = [pool.submit(stream, router.url, question) for question in asked]
        while router.handoffs()["moved"] < start + 5:
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
