"""A think server and its answer engine: what a client sees of a stream, and checks of both."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from run_engine import PATCHED
from run_server import Server

from meridian_patch.demo.problems import make_problems

MERIDIAN = str(Path(sys.executable).parent / "meridian")
CHAT = "/v1/chat/completions"
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


@contextmanager
def both_engines(demo_model, folder: Path, *options: str, env: dict[str, str]):
    """A think server that knows its answer engine, and that engine, started at the same time."""
    answer = engine(demo_model, folder, "answer", *options, env=env)
    think = engine(demo_model, folder, "think", "--answer", answer.url, *options, env=env)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield tuple(pool.map(stack.enter_context, (think, answer)))


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


def handoffs(server: Server, outcome: str) -> int:
    """Requests of a think server that ended so, or that stayed for this reason."""
    lines = server.get("/metrics").splitlines()
    wanted = [line for line in lines if line.startswith("meridian_handoff") and "_total{" in line]
    return sum(int(float(line.split()[-1])) for line in wanted if f'"{outcome}"}}' in line)


def wait_until_empty(server: Server, limit_s: float) -> None:
    began_at = time.monotonic()
    while total(server, "vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() - began_at < limit_s
        time.sleep(0.1)


def check_streams(engines) -> str:
    """Thought, answer and usage of 24 streams, token for token, with eight at a time.

    Returns:
        What was shown, as the compatibility page says it.
    """
    think, answer = engines
    asked = questions(24)
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda question: stream(answer.url, question), asked))
        before, loaded = handoffs(think, "moved"), total(answer, LOADED)
        moved = list(pool.map(lambda question: stream(think.url, question), asked))
    for one, two in zip(alone, moved, strict=True):
        assert (two.reasoning, two.content) == (one.reasoning, one.content)
        assert two.reasoning
        assert two.content
        assert two.finish_reason == one.finish_reason == "stop"
        assert two.usage == one.usage
        assert len(two.ids) == 1
    assert handoffs(think, "moved") - before == len(asked)
    assert handoffs(think, "answered_at_home") == 0
    # It was the answer engine that answered, from blocks that it did not compute.
    assert total(answer, LOADED) > loaded
    assert LOAD_FAILURE not in answer.log.read_text()
    gaps = sorted(two.gap_s for two in moved)
    print(f"\ngap: median {1e3 * gaps[12]:.0f} ms, worst {1e3 * gaps[-1]:.0f} ms")
    tokens = sum(two.usage["completion_tokens"] for two in moved)
    return f"{len(asked)} requests, {tokens} tokens as one engine's; all moved after their thought"


def check_a_lost_answer_engine(engines) -> None:
    """Killed between and within answers: the think server goes on from the tokens sent."""
    think, answer = engines
    asked = questions(12, seed=9)
    with ThreadPoolExecutor(6) as pool:
        alone = list(pool.map(lambda question: stream(answer.url, question), asked))
        start = handoffs(think, "moved")
        futures = [pool.submit(stream, think.url, question) for question in asked]
        while handoffs(think, "moved") < start + 4:
            time.sleep(0.02)
        answer.kill()
        moved = [future.result() for future in futures]
    for one, two in zip(alone, moved, strict=True):
        assert two.error is None
        assert (two.reasoning, two.content) == (one.reasoning, one.content)
        assert two.usage == one.usage
    assert handoffs(think, "answered_at_home") > 0
