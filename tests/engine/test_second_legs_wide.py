"""Requests that move away from think servers of several ranks, and from engines under pressure."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from handoff_runs import (
    CHAT,
    LOAD_FAILURE,
    both_engines,
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
    check_same(alone, moved)
    assert LOAD_FAILURE not in answer.log.read_text()


def check_same(alone, moved) -> None:
    """Each stream of a think server is that of one engine."""
    for one, two in zip(alone, moved, strict=True):
        assert two.error is None
        assert (two.reasoning, two.content) == (one.reasoning, one.content)
        assert two.usage == one.usage


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


def test_an_answer_engine_that_drains(demo_model, tmp_path):
    """SIGTERM while requests answer there: their text stays that of one engine."""
    with (
        engine(demo_model, tmp_path, "answer", "--shutdown-timeout", "30", env=ENV) as drained,
        thinking(demo_model, tmp_path, drained) as think,
    ):
        let_run_on_all_cores((drained,))
        asked = questions(24, seed=43)
        with ThreadPoolExecutor(6) as pool:
            alone = list(pool.map(lambda question: stream(drained.url, question), asked))
            futures = [pool.submit(stream, think.url, question) for question in asked]
            while handoffs(think, "moved") < 4:
                assert not all(future.done() for future in futures), "fewer than four moved"
                time.sleep(0.02)
            drained.ask_to_stop()
            moved = [future.result() for future in futures]
        check_same(alone, moved)
        assert drained.wait(60) == 0
        assert handoffs(think, "moved") < len(asked)
        wait_until_empty(think, 45)


def test_caches_are_reset_while_requests_are_away(demo_model, tmp_path):
    """Blocks that wait for a reader, and those that were read, are no cache to be emptied."""
    env = ENV | {"VLLM_SERVER_DEV_MODE": "1"}
    with both_engines(demo_model, tmp_path, env=env) as engines, ThreadPoolExecutor(8) as pool:
        let_run_on_all_cores(engines)
        think, answer = engines
        asked = questions(24, seed=47)
        alone = list(pool.map(lambda question: stream(answer.url, question), asked))
        futures = [pool.submit(stream, think.url, question) for question in asked]
        resets = 0
        while not all(future.done() for future in futures):
            for server in engines:
                httpx.post(f"{server.url}/reset_prefix_cache", timeout=30).raise_for_status()
            resets += 1
            time.sleep(0.1)
        check_same(alone, [future.result() for future in futures])
        assert resets > 3
        # On a machine that stalls, the answer engine is too slow for some.
        assert handoffs(think, "moved") > len(asked) // 2
        for server in engines:
            wait_until_empty(server, 45)


def leave(server, question: str) -> bool:
    """Ask, and close the connection within the thought or the answer."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=120) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number > len(question):
                break
        return response.status_code == 200
