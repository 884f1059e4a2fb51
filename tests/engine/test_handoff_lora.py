"""Two real engines that serve other weights under one adapter's name."""

import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path

import httpx
import pytest
from handoff_runs import needs_nixl
from probe_reference import make_adapter
from run_engine import PATCHED
from run_server import Server

from meridian_patch.demo.problems import make_problems
from meridian_patch.handoff.requests import ingest, offload, resume, ticket_in
from meridian_patch.handoff.ticket import FACTS, PROMPT_IDS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    needs_nixl,
]

MERIDIAN = str(Path(sys.executable).parent / "meridian")
# Upstream's CPU kernels give requests without an adapter that of the last slot: it is empty.
OPTIONS = (
    *("--gpu-memory-utilization", "0.2", "--reasoning-parser", "qwen3"),
    *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"),
)
# Of adapters: with the first the model ends its thoughts, and with the second it says other tokens.
SIZES = (0.05, 0.3)
QUESTIONS = 4
# Of an answer: what the second adapter says would not end.
ANSWER_TOKENS = 16


def engine(demo_model, folder: Path, role: str, adapters: dict[str, Path]) -> Server:
    command = [MERIDIAN, "serve", str(demo_model), "--served-model-name", "m", "--role", role]
    command += ["--offload-threshold-blocks", "0", *OPTIONS, "--lora-modules"]
    command += [f"{name}={path}" for name, path in adapters.items()]
    return Server(command, PATCHED | {"UCX_TLS": "tcp,self,sm"}, folder / role)


@pytest.fixture(scope="module")
def engines(demo_model, tmp_path_factory):
    """A think and an answer engine: ``same`` has the same weights on both, ``other`` has not."""
    folder = tmp_path_factory.mktemp("handoff-lora")
    for number, size in enumerate(SIZES):
        make_adapter(demo_model, folder / f"adapter{number}", seed=number, size=size)
    shutil.copytree(folder / "adapter0", folder / "copy")
    served = {
        "think": {"same": folder / "adapter0", "other": folder / "adapter0"},
        "answer": {"same": folder / "copy", "other": folder / "adapter1"},
    }
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        servers = [engine(demo_model, folder, *each) for each in served.items()]
        yield tuple(pool.map(stack.enter_context, servers))


def said(server: Server, body: dict) -> dict:
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def answer_of(reply: dict) -> tuple[str, list[float]]:
    """What was said after the thought, and the log-probability of each of its tokens."""
    choice = reply["choices"][0]
    text = (choice["message"].get("reasoning") or "") + (choice["message"]["content"] or "")
    return text, [token["logprob"] for token in choice["logprobs"]["content"]]


def is_as(one: tuple[str, list[float]], two: tuple[str, list[float]]) -> bool:
    """Whether both are of the same weights: the same tokens, as probable."""
    return one[0] == two[0] and one[1] == pytest.approx(two[1], abs=2e-3)


def asked(adapter: str, seed: int) -> list[dict]:
    return [
        {
            "model": adapter,
            "messages": [{"role": "user", "content": problem.question}],
            "temperature": 0,
            "max_tokens": 500,
            "logprobs": True,
        }
        for problem in make_problems(QUESTIONS, seed)
    ]


def thought(server: Server, body: dict) -> dict:
    """The ticket of a request that thought."""
    ticket = ticket_in(said(server, offload(body)))
    ticket[FACTS]["max_tokens_left"] = ANSWER_TOKENS
    return ticket


def own(server: Server, body: dict, ticket: dict) -> tuple[str, list[float]]:
    """What an engine says after a thought whose tokens it computes itself, whatever it cached."""
    facts = ticket[FACTS]
    rest = resume(body, ticket[PROMPT_IDS], facts["num_output_tokens"], facts["max_tokens_left"])
    return answer_of(said(server, rest | {"cache_salt": "own"}))


def loaded_tokens(server: Server) -> float:
    """Tokens whose KV cache came from the other engine."""
    page = server.get("/metrics").splitlines()
    (line,) = [each for each in page if each.startswith("vllm:external_prefix_cache_hits_total")]
    return float(line.split()[-1])


def test_equal_weights_move(engines):
    """The answer is that of the engine that thought."""
    think, answer = engines
    for body in asked("same", 3):
        ticket = thought(think, body)
        before = loaded_tokens(answer)
        assert is_as(answer_of(said(answer, ingest(body, ticket))), own(think, body, ticket))
        assert loaded_tokens(answer) > before
    assert "LoRA adapter 'same'" not in answer.log.read_text()


def test_other_weights_are_computed_again(engines):
    """The answer is that of the answer engine's own weights, and its log names the difference."""
    think, answer = engines
    before = loaded_tokens(answer)
    for body in asked("other", 3):
        ticket = thought(think, body)
        assert is_as(answer_of(said(answer, ingest(body, ticket))), own(answer, body, ticket))
    assert loaded_tokens(answer) == before
    lines = [line for line in answer.log.read_text().splitlines() if "adapter 'other'" in line]
    assert len([line for line in lines if "not handed off to this engine" in line]) == 1

    # A KV cache of other weights would have changed what is said.
    [digest] = {re.search(r"and '(\w+)' here", line)[1] for line in lines if "digest" in line}
    differ = 0
    for body in asked("other", 4):
        ticket = thought(think, body)
        forged = deepcopy(ticket)
        forged[FACTS]["adapter"] = digest
        foreign = answer_of(said(answer, ingest(body, forged)))
        differ += not is_as(foreign, own(answer, body, ticket))
    assert loaded_tokens(answer) > before
    assert differ == QUESTIONS
