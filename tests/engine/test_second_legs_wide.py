"""Requests that move away from think servers of several ranks, and from engines under pressure."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from handoff_runs import (
    CHAT,
    LOAD_FAILURE,
    engine,
    handoffs,
    let_run_on_all_cores,
    needs_nixl,
    questions,
    stream,
    total,
    wait_until_empty,
)
from matrix_checks import STARTS_RANKS

pytestmark = [pytest.mark.engine, pytest.mark.nightly, needs_nixl]

ENV = {"UCX_TLS": "tcp,self,sm"}
# Drafts are accepted behind the boundary, and the pool holds a third of what runs.
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}'
PRESSED = ("--speculative-config", DRAFTS, "--num-gpu-blocks-override", "48")


@pytest.fixture(scope="module")
def answer(demo_model, tmp_path_factory):
    with engine(demo_model, tmp_path_factory.mktemp("wide"), "answer", env=ENV) as started:
        let_run_on_all_cores((started,))
        yield started


@contextmanager
def thinking(demo_model, folder, answer, *options: str):
    """A think server with these options, which knows the answer engine."""
    with engine(demo_model, folder, "think", "--answer", answer.url, *options, env=ENV) as started:
        let_run_on_all_cores((started,))
        yield started


def check_all_move(think, answer, *, width: int, seed: int) -> None:
    asked = questions(24, seed=seed)
    with ThreadPoolExecutor(width) as pool:
        alone = list(pool.map(lambda question: stream(answer.url, question), asked))
        moved = list(pool.map(lambda question: stream(think.url, question), asked))
    for one, two in zip(alone, moved, strict=True):
        assert two.error is None
        assert (two.reasoning, two.content) == (one.reasoning, one.content)
        assert two.usage == one.usage
    assert LOAD_FAILURE not in answer.log.read_text()


@STARTS_RANKS
def test_ranks_behind_several_api_servers(demo_model, answer, tmp_path):
    """Each API server has legs of its own, and a request that comes back goes to its rank."""
    options = ("--data-parallel-size", "2", "--api-server-count", "2")
    with thinking(demo_model, tmp_path, answer, *options) as think:
        check_all_move(think, answer, width=8, seed=31)
        assert handoffs(think, "moved") == 24
        assert handoffs(think, "answered_at_home") == 0
        for rank in ("0", "1"):
            assert total(think, f'vllm:prompt_tokens_total{{engine="{rank}"') > 0
        wait_until_empty(think, 40)


def test_drafts_and_preemptions(demo_model, answer, tmp_path):
    """Accepted drafts behind the boundary are not said twice, and clients leave meanwhile."""
    with thinking(demo_model, tmp_path, answer, *PRESSED) as think, ThreadPoolExecutor(4) as pool:
        leavers = [pool.submit(leave, think, question) for question in questions(8, seed=41)]
        check_all_move(think, answer, width=16, seed=37)
        assert all(each.result() for each in leavers)
        assert handoffs(think, "moved") > 12
        assert total(think, "vllm:num_preemptions_total") > 0
        assert total(think, "vllm:spec_decode_num_accepted_tokens_total") > 0
        for server in (think, answer):
            wait_until_empty(server, 45)


def leave(server, question: str) -> bool:
    """Ask, and close the connection within the thought or the answer."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=120) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number > len(question):
                break
        return response.status_code == 200
