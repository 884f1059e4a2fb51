"""A whole comparison, from options to table and report, on stand-ins for servers."""

import argparse
import io
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from meridian_patch.bench.served import plan, run
from meridian_patch.bench.served.command import add_serve
from meridian_patch.bench.served.pace import paced
from meridian_patch.bench.served.plan import plan_comparison
from meridian_patch.bench.served.workload import Pause, Turns, make_conversations, read_trace
from meridian_patch.errors import BenchError

pytestmark = pytest.mark.slow

END_MARKER = 257
# Prompt tokens that a later turn finds in the cache, of the 100 of its prompt, by pool.
HITS = {129: 40, 20 * 129: 80}


class Handler(BaseHTTPRequestHandler):
    """Answers what the comparison asks of a server; a request has one think token and an answer."""

    def do_GET(self):
        self._reply(self.server.owner.page().encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        owner = self.server.owner
        if self.path == "/tokenize":
            self._reply(json.dumps({"tokens": [END_MARKER]}).encode())
        elif self.path == "/reset_prefix_cache":
            owner.resets.append(owner.name)
            self._reply(b'{"success": true}')
        else:
            owner.count(len(json.loads(body)["messages"]))
            tokens = (9, END_MARKER, 5, 6)
            choices = [{"token_ids": [token], "delta": {"content": "x"}} for token in tokens]
            choices[-1]["finish_reason"] = "stop"
            chunks = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
            self._reply("".join(chunks).encode())

    def log_message(self, *_):
        pass

    def _reply(self, body: bytes):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


class StandIn:
    """In place of ``ServerProcess``: a server in a thread, which counts as vLLM would."""

    resets: list[str]
    starts: list[str]
    broken: str

    def __init__(self, settings, env: Mapping[str, str], log_path: Path, port: int, on_wait):
        on_wait(1.0)
        self.name = log_path.stem.removeprefix("server-")
        self._is_ours = env["MERIDIAN_PATCH"] == "1"
        self._hits_of_turn = HITS.get(settings.kv_blocks, 0) + (20 if self._is_ours else 0)
        self._queries = self._hits = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.owner = self
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self):
        self.starts.append(f"launch {self.name}")
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def wait_until_healthy(self):
        self.starts.append(f"wait for {self.name}")
        if self.name == self.broken:
            raise BenchError("the vLLM server ended")

    def check_alive(self):
        pass

    def count(self, num_messages: int):
        with self._lock:
            self._queries += 100
            self._hits += self._hits_of_turn if num_messages > 2 else 0

    def page(self) -> str:
        values = {"vllm:prefix_cache_queries": self._queries, "vllm:prefix_cache_hits": self._hits}
        if self._is_ours:
            values["meridian_preemptions"] = 0
        return "".join(f"# TYPE {n}_total counter\n{n}_total {v}\n" for n, v in values.items())


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """No server is started, and no accelerator is looked for."""
    monkeypatch.setattr(run, "ServerProcess", StandIn)
    monkeypatch.setattr(run, "accelerator_name", lambda: None)
    monkeypatch.setattr(plan, "accelerator_name", lambda: None)
    monkeypatch.setattr(StandIn, "resets", [], raising=False)
    monkeypatch.setattr(StandIn, "starts", [], raising=False)
    monkeypatch.setattr(StandIn, "broken", "", raising=False)


@pytest.fixture
def serve(tmp_path):
    """Runs ``meridian bench serve``; gives its exit code, what it printed and its results."""

    def serve_with(*options: str) -> tuple[int, str, dict]:
        parser = add_serve(argparse.ArgumentParser().add_subparsers())
        parsed = parser.parse_args([*options, "--out", str(tmp_path)])
        console = Console(file=io.StringIO(), width=120)
        code = run.run_comparison(plan_comparison(parsed, "meridian", console), console)
        data = json.loads((tmp_path / "results.json").read_text())
        return code, console.file.getvalue(), data

    return serve_with


# One client process is quick to start.
OWN_PAUSES = (
    "--clients",
    "1",
    "--workload",
    "turns",
    "--rate",
    "100",
    "--requests",
    "20",
)
CONVERSATIONS = (*OWN_PAUSES, "--pause", "0.01")
ARMS = ("--arms", "stock,ample,patched", "--blocks", "129")


def test_turns_end_in_a_table_of_prefix_hits(serve):
    """Arms take turns, another one first for each seed; hits and misses are those counted."""
    code, printed, data = serve(*CONVERSATIONS, *ARMS, "--seeds", "1,2")
    assert code == 0, printed
    arms = ["stock", "ample", "patched"]
    assert StandIn.resets == [*arms, "ample", "patched", "stock"]
    for seed in ("1", "2"):
        hits = {name: arm["by_seed"][seed]["hit_share"] for name, arm in data["arms"].items()}
        assert hits["ample"] == pytest.approx(2 * hits["stock"])
        assert hits["patched"] == pytest.approx(1.5 * hits["stock"])
        misses = data["over_stock"]["patched"]["avoidable_misses"]["by_seed"][seed]
        assert misses == pytest.approx(0.5)
        assert data["arms"]["patched"]["by_seed"][seed]["failed_requests"] == 0
        assert data["arms"]["patched"]["by_seed"][seed]["requests"] == 20
    for words in ("prefix hits, %", "avoidable misses, stock = 1", "0.5", "patched / stock"):
        assert words in printed


def test_an_arm_that_fails_leaves_the_others(serve, monkeypatch):
    """Its error is shown and kept, the other arms are played and compared."""
    monkeypatch.setattr(StandIn, "broken", "ample")
    code, printed, data = serve("--requests", "5", "--clients", "1", *ARMS, "--pairs", "2")
    assert code == 1
    assert "ample: the vLLM server ended" in printed
    assert StandIn.resets == ["stock", "patched", "patched", "stock"]
    assert data["arms"]["ample"]["error"] == "the vLLM server ended"
    assert data["over_stock"]["patched"]["tokens_per_s"]["value"] > 0
    assert "prefix hits" not in printed


@pytest.mark.nightly
@pytest.mark.parametrize("accelerator", [None, "a GPU"])
def test_servers_start_beside_each_other_without_an_accelerator(serve, monkeypatch, accelerator):
    """With one, vLLM measures its memory while it starts, and another server would be in it."""
    monkeypatch.setattr(plan, "accelerator_name", lambda: accelerator)
    serve("--requests", "5", "--clients", "1", "--arms", "stock,patched", "--pairs", "1")
    launch = ["launch stock", "launch patched"]
    wait = ["wait for stock", "wait for patched"]
    one_by_one = [launch[0], wait[0], launch[1], wait[1]]
    assert StandIn.starts == (one_by_one if accelerator else launch + wait)


TWO_ARMS = ("--arms", "stock,ample", "--blocks", "129", "--seeds", "1")


def give_pace(monkeypatch, paces_s):
    """Let servers show a time per token, in the order of the arms; errors are raised."""
    shown = iter(paces_s)

    def token_time_s(client, check_server):
        pace = next(shown)
        if isinstance(pace, BaseException):
            raise pace
        return pace

    monkeypatch.setattr(run, "token_time_s", token_time_s)


@pytest.mark.nightly
def test_pauses_in_tokens_are_alike_on_slow_and_fast_machines(serve, monkeypatch, tmp_path):
    """They last as long as the fastest server takes for these tokens, and the page says it."""
    give_pace(monkeypatch, [0.004, 0.003])
    code, printed, data = serve(*OWN_PAUSES, *TWO_ARMS, "--pause-tokens", "2.5")
    assert code == 0, printed
    drawn = make_conversations(Turns(20, 100.0, Pause(2.5, "tokens")), 1)
    assert read_trace(tmp_path / "trace-1.jsonl") == paced(drawn, 0.003)
    assert "One request alone gets a token every 3.00 ms here." in " ".join(printed.split())
    assert "pauses of 2.5 tokens" in data["workload"]
    assert "every 3.00 ms here" in data["workload"]
    assert data["token_s"] == 0.003


@pytest.mark.nightly
def test_an_arm_without_a_pace_is_left_out(serve, monkeypatch):
    """Its error is shown, as when its server does not start; the others are played."""
    give_pace(monkeypatch, [0.004, BenchError("no token came")])
    code, printed, data = serve(*OWN_PAUSES, *TWO_ARMS, "--pause-tokens", "2.5")
    assert code == 1
    assert "ample: no token came" in printed
    assert StandIn.resets == ["stock"]
    assert data["token_s"] == 0.004


def test_ctrl_c_while_the_pace_is_measured_says_so(monkeypatch, tmp_path):
    """As at any other time; no trace is left with pauses in tokens."""
    give_pace(monkeypatch, [KeyboardInterrupt()])
    parser = add_serve(argparse.ArgumentParser().add_subparsers())
    options = [*OWN_PAUSES, *TWO_ARMS, "--pause-tokens", "2", "--out", str(tmp_path)]
    console = Console(file=io.StringIO(), width=120)
    parsed = parser.parse_args(options)
    assert run.run_comparison(plan_comparison(parsed, "meridian", console), console) == 130
    assert "stock: interrupted" in console.file.getvalue()
    assert not list(tmp_path.glob("trace-*"))


def test_no_pace_is_measured_without_later_turns(serve, monkeypatch, tmp_path):
    """Single problems have no pauses."""
    give_pace(monkeypatch, [])
    problems = ("--requests", "5", "--clients", "1", "--arms", "stock", "--pairs", "1")
    code, printed, data = serve(*problems, "--pause-tokens", "5")
    assert code == 0, printed
    assert data["token_s"] is None
    assert (tmp_path / "trace-11.jsonl").exists()
