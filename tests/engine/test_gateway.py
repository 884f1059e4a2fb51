"""A gateway of others before two think servers, whose requests answer at two answer engines."""

import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from handoff_runs import CHAT, engine, handoffs, let_run_on_all_cores, needs_nixl, questions
from run_engine import clean_environment, log_tail
from run_server import free_port

VLLM_ROUTER = Path(sys.executable).parent / "vllm-router"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    needs_nixl,
    pytest.mark.skipif(
        not VLLM_ROUTER.exists(), reason="no vllm-router here: scripts/setup --nightly installs it"
    ),
]
SESSIONS = 20
# The header that vllm-router's consistent hash reads.
SESSION = "x-session-id"


@contextmanager
def gateway(urls, folder):
    """vllm-router before these servers; yields its address."""
    port, log = free_port(), folder / "vllm-router.log"
    command = [str(VLLM_ROUTER), "--worker-urls", *urls, "--policy", "consistent_hash"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=clean_environment(folder), stdout=sink, stderr=sink, cwd=folder
        )
    try:
        url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            assert process.poll() is None, log_tail(log)
            assert time.monotonic() < until_s, log_tail(log)
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.timeout(1500)
def test_two_hundred_streams_behind_a_gateway(demo_model, tmp_path):
    """Sessions stay at their think server; an answer engine killed in between costs no request."""
    env = {"UCX_TLS": "tcp,self,sm"}
    answers = [engine(demo_model, tmp_path / name, "answer", env=env) for name in "ab"]
    known = [part for each in answers for part in ("--answer", each.url)]
    thinks = [engine(demo_model, tmp_path / name, "think", *known, env=env) for name in "cd"]
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        servers = [*thinks, *answers]
        for pair in (answers, thinks):
            # Four at once would take two cores longer than a server may.
            list(pool.map(stack.enter_context, pair))
        let_run_on_all_cores(servers)
        url = stack.enter_context(gateway([each.url for each in thinks], tmp_path))
        asked = questions(SESSIONS, seed=21)

        def ask(address: str, number: int) -> str:
            body = {"messages": [{"role": "user", "content": asked[number % SESSIONS]}]}
            body |= {"model": "m", "temperature": 0}
            headers = {SESSION: f"session-{number % SESSIONS}"}
            reply = httpx.post(f"{address}{CHAT}", json=body, headers=headers, timeout=180)
            assert reply.status_code == 200, reply.text
            message = reply.json()["choices"][0]["message"]
            return f"{message['reasoning']}|{message['content']}"

        alone = list(pool.map(lambda number: ask(answers[1].url, number), range(SESSIONS)))
        first = list(pool.map(lambda number: ask(url, number), range(100)))
        shares = [handoffs(each, "moved") for each in thinks]
        rest = [pool.submit(ask, url, number) for number in range(100, 200)]
        while sum(handoffs(each, "moved") for each in thinks) < sum(shares) + 20:
            time.sleep(0.05)
        answers[0].kill()
        second = [each.result() for each in rest]
        assert [first, second] == [[alone[number % SESSIONS] for number in range(100)]] * 2
        ended = Counter()
        for outcome in ("moved", "answered_at_home", "aborted"):
            ended[outcome] = sum(handoffs(each, outcome) for each in thinks)
        print(f"\nrequests that moved by think server: {shares}; all: {dict(ended)}")
        assert sum(shares) == 100
        # Five requests of a session each: a whole number of sessions per server.
        assert all(share and share % 5 == 0 for share in shares)
        assert ended["moved"] + ended["answered_at_home"] == 200
        assert 0 < ended["answered_at_home"] < 60
        check_stop(thinks[0])


def check_stop(think) -> None:
    """A think server that is stopped ends at once, also while its requests answer elsewhere."""
    body = {"messages": [{"role": "user", "content": questions(1)[0]}], "stream": True}
    body |= {"min_tokens": 700, "max_tokens": 900, "temperature": 0}
    with httpx.stream("POST", f"{think.url}{CHAT}", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for line in lines:
            if '"content":"' in line and '"content":""' not in line:
                break
        began_at = time.monotonic()
        think.ask_to_stop()
        with suppress(httpx.HTTPError):
            list(lines)
    think.wait(40)
    took_s = time.monotonic() - began_at
    print(f"\nstopped after {took_s:.1f} s")
    # Without the end of its requests elsewhere it waits for its client, 60 s here.
    assert took_s < 20
    log = think.log.read_text()
    assert "Unclosed" not in log
    assert "Traceback" not in log[-4000:]
