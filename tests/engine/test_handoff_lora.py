"""Two real engines that serve other weights under one adapter's name."""

import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import pytest
from handoff_runs import needs_nixl
from probe_reference import make_adapter
from run_engine import PATCHED
from run_server import Server

from meridian_patch.demo.problems import make_problems
from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.engine.wire import FACTS
from meridian_patch.handoff.answer_engine import TOKENS
from meridian_patch.handoff.requests import ingest, offload, ticket_in

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    needs_nixl,
]

MERIDIAN = str(Path(sys.executable).parent / "meridian")
# Upstream's CPU kernels give requests without an adapter that of the last slot: it is empty.
OPTIONS = (
    *("--gpu-memory-utilization", "0.2", "--reasoning-parser", "qwen3"),
    *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--enable-scale-out"),
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


def generated(server: Server, body: dict) -> dict:
    reply = httpx.post(f"{server.url}{TOKENS}", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(server: Server, body: dict) -> tuple[list[int], list[float]]:
    """The tokens of a response, and the log-probability of each."""
    (choice,) = generated(server, body)["choices"]
    return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


def is_as(one: tuple[list[int], list[float]], two: tuple[list[int], list[float]]) -> bool:
    """Whether both are of the same weights: the same tokens, as probable."""
    return one[0] == two[0] and one[1] == pytest.approx(two[1], abs=2e-3)


def asked(adapter: str, seed: int) -> list[dict]:
    tokenizer = build_tokenizer()
    chats = [
        [{"role": "user", "content": problem.question}]
        for problem in make_problems(QUESTIONS, seed)
    ]
    return [
        {
            "model": adapter,
            "token_ids": tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            ),
            "sampling_params": {"temperature": 0, "max_tokens": 500, "logprobs": 1},
        }
        for chat in chats
    ]


@dataclass
class Moving:
    """A request whose thought has ended, of which so many tokens of the answer are asked."""

    body: dict
    thought: list[int]
    ticket: dict

    @classmethod
    def of(cls, server: Server, body: dict) -> Self:
        reply = generated(server, offload(body))
        ticket = ticket_in(reply)
        assert ticket is not None
        ticket[FACTS]["max_tokens_left"] = ANSWER_TOKENS
        return cls(body, reply["choices"][0]["token_ids"], ticket)

    def rest(self) -> dict:
        return ingest(self.body, self.thought, self.ticket)

    def own(self) -> dict:
        """The same for an engine that computes the thought itself, whatever it cached."""
        body = {**self.rest(), "cache_salt": "own"}
        del body["kv_transfer_params"]
        return body


def loaded_tokens(server: Server) -> float:
    """Tokens whose KV cache came from the other engine."""
    page = server.get("/metrics").splitlines()
    (line,) = [each for each in page if each.startswith("vllm:external_prefix_cache_hits_total")]
    return float(line.split()[-1])


def test_equal_weights_move(engines):
    """The answer is that of the engine that thought."""
    think, answer = engines
    for body in asked("same", 3):
        moving = Moving.of(think, body)
        before = loaded_tokens(answer)
        assert is_as(said(answer, moving.rest()), said(think, moving.own()))
        assert loaded_tokens(answer) > before
    assert "LoRA adapter 'same'" not in answer.log.read_text()


def test_other_weights_are_computed_again(engines):
    """The answer is that of the answer engine's own weights, and its log names the difference."""
    think, answer = engines
    before = loaded_tokens(answer)
    for body in asked("other", 3):
        moving = Moving.of(think, body)
        assert is_as(said(answer, moving.rest()), said(answer, moving.own()))
    assert loaded_tokens(answer) == before
    lines = [line for line in answer.log.read_text().splitlines() if "adapter 'other'" in line]
    assert len([line for line in lines if "not handed off to this engine" in line]) == 1

    # A KV cache of other weights would have changed what is said.
    [digest] = {re.search(r"and '(\w+)' here", line)[1] for line in lines if "digest" in line}
    differ = 0
    for body in asked("other", 4):
        moving = Moving.of(think, body)
        own = said(answer, moving.own())
        moving.ticket[FACTS]["adapter"] = digest
        differ += not is_as(said(answer, moving.rest()), own)
    assert loaded_tokens(answer) > before
    assert differ == QUESTIONS
