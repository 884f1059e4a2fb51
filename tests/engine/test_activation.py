"""Each documented way of switching on reaches the EngineCore process; nothing else does."""

import json
import shutil
import subprocess
import sys
import time
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest
from run_engine import JOBS, PATCHED, STOCK, Job, clean_environment, run_job
from run_server import API_SERVER, Server
from workloads import ask, engine_arguments, phases_after_prefill, sample

import meridian_patch
import meridian_patch.configs
import meridian_patch.kernels
from meridian_patch import patches
from meridian_patch.operate.doctor.server import check_server
from meridian_patch.operate.http_client import ServerClient

pytestmark = pytest.mark.engine

QUESTION = "p=7, q=p+5, r=q*3. r?"
PATCHES = {patch.name for patch in patches.PATCHES}
SCHEDULER_CLS = "meridian_patch.engine.scheduler_cls.AsyncPhaseScheduler"
PARSER = ("--reasoning-parser", "deepseek_r1")


def one_answer(model: Path, **changes) -> list[dict]:
    """A stage that answers one question."""
    run = {"name": "one", "requests": [ask("q", QUESTION, max_tokens=20)]}
    return [{"name": "only", "engine": engine_arguments(model, **changes), "runs": [run]}]


def assert_live_in_engine_core(reports: list[dict], launcher_pid: int) -> None:
    cores = [report for report in reports if report["role"] == "engine_core"]
    assert len(cores) == 1
    core = cores[0]
    assert core["pid"] != launcher_pid
    assert core["parent_pid"] == launcher_pid
    assert core["scheduler"] == "PhaseScheduler"
    assert core["scheduler_base"] == "Scheduler"
    assert core["boundaries"] is not None
    assert {p["patch"]: p["outcome"] for p in core["patches"]} == dict.fromkeys(PATCHES, "applied")


def test_vllm_plugins_patches_a_server(demo_model, tmp_path):
    """VLLM_PLUGINS=meridian_patch patches EngineCore and exports metrics from the API server."""
    command = [*API_SERVER, "--model", str(demo_model), *PARSER]
    # So that it goes on when its engine has ended.
    env = {**PATCHED, "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    with Server(command, env, tmp_path, is_cold=True) as server:
        reply = server.chat(QUESTION, max_tokens=200)
        reports, metrics = server.status(), server.get("/metrics")
        assert_live_in_engine_core(reports, server.pid)
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        _, text = server.post("/v1/chat/completions", body)
        assert_status_shows_server_and_engine(server, demo_model)
    usage = reply["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    # A stream's usage is in its last event but "[DONE]".
    streamed = json.loads(text.split("data: ")[-2])["usage"]
    assert streamed["completion_tokens_details"] == usage["completion_tokens_details"]
    assert "TYPE meridian_requests" in metrics


def assert_status_shows_server_and_engine(server: Server, model: Path) -> None:
    """The API server with its port, its engine below it, which is red once it has ended."""

    def shown() -> tuple[int, str]:
        command = [sys.executable, "-P", "-m", "meridian_patch.cli", "status"]
        env = clean_environment(server.status_directory.parent)
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return run.returncode, run.stdout

    [engine] = [psutil.Process(each["pid"]) for each in server.status() if "scheduler" in each]
    code, text = shown()
    assert code == 0
    lines = [line.partition("  vLLM")[0] for line in text.splitlines()]
    assert lines[0] == f"API server  pid {server.pid}  port {server.port}"
    assert f"  engine_core  pid {engine.pid}" in lines
    assert str(model) in "".join(text.split())
    engine.kill()
    deadline = time.monotonic() + 60
    while "engine core exited unexpectedly" not in server.log.read_text():
        assert time.monotonic() < deadline, "the API server has not seen its engine end"
        time.sleep(0.2)
    code, text = shown()
    assert code == 1
    assert f"\n  engine_core  pid {engine.pid}  has ENDED" in text


@pytest.mark.nightly
def test_meridian_serve_patches_a_server(demo_model, tmp_path):
    """`meridian serve MODEL` starts vLLM's own server with EngineCore patched."""
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "serve", str(demo_model)]
    with Server(command, {}, tmp_path) as server:
        assert server.chat(QUESTION, max_tokens=20)["usage"]["completion_tokens"] > 0
        assert_live_in_engine_core(server.status(), server.pid)
        assert "TYPE meridian_requests" in server.get("/metrics")


@pytest.mark.nightly
def test_import_patches_an_llm(demo_model, tmp_path):
    """`import meridian_patch` before `vllm.LLM` patches the EngineCore that LLM starts."""
    job = Job(one_answer(demo_model), import_meridian_patch=True, in_process=False)
    result = run_job(job, tmp_path)
    assert_live_in_engine_core(result["stages"]["only"]["status"], result["pid"])
    assert sample(result["stages"]["only"]["runs"]["one"], "q")["ids"]


@pytest.mark.nightly
def test_an_installed_package_changes_nothing(demo_model, tmp_path):
    """Without any of the three ways a server with all plug-ins loaded runs stock."""
    command = [*API_SERVER, "--model", str(demo_model), *PARSER]
    with Server(command, {}, tmp_path, is_cold=True) as server:
        reply = server.chat(QUESTION, max_tokens=200)
        assert reply["choices"][0]["message"]["reasoning"]
        # Stock does not know that the template opened the thought.
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
        assert "meridian" not in reply["choices"][0]
        assert server.status() == []
        metrics = server.get("/metrics")
        findings = {each.check: each for each in check_server(ServerClient(server.url), [])}
    assert "it runs stock" in findings["metrics"].found
    assert "vllm:num_requests_running" in metrics
    assert "TYPE meridian_" not in metrics
    assert "meridian_patch live" not in server.log.read_text()


def test_the_off_switch_beats_vllm_plugins(demo_model, tmp_path):
    """MERIDIAN_PATCH=0 leaves the engine stock although VLLM_PLUGINS names the plug-in."""
    job = Job(one_answer(demo_model), env=PATCHED | {"MERIDIAN_PATCH": "0"})
    stage = run_job(job, tmp_path)["stages"]["only"]
    assert stage["scheduler"][0] == "Scheduler"
    assert stage["status"] == []


OFF = {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": "meridian_patch,meridian_switch"}
# A configuration that stops a patched start.
WRONG = {"MERIDIAN_PATCH_SET_POLICY__NAME": "fast", "MERIDIAN_PATCH_CONFIG": "/no/such/file"}


@pytest.mark.nightly
@pytest.mark.parametrize("entry", ("plug-ins", "import", "scheduler-cls"))
def test_the_off_switch_leaves_an_engine_stock(demo_model, tmp_path, entry):
    """However the engine was made phase-aware, and whatever is configured."""
    changes = {"scheduler_cls": SCHEDULER_CLS} if entry == "scheduler-cls" else {}
    is_imported = entry == "import"
    job = Job(one_answer(demo_model, **changes), env=OFF | WRONG, import_meridian_patch=is_imported)
    stage = run_job(job, tmp_path)["stages"]["only"]
    assert stage["scheduler"][0] == ("AsyncScheduler" if changes else "Scheduler")
    assert stage["status"] == []
    assert sample(stage["runs"]["one"], "q")["ids"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "ours",
    (
        ("--role", "think", "--answer", "http://localhost:1", "--policy", "latency"),
        ("--scheduler-cls", SCHEDULER_CLS, "--no-async-scheduling"),
        ("--emulate", "h100-8b-dense", "--emulate-beside-gpu"),
    ),
    ids=("role", "scheduler-cls", "emulate"),
)
def test_the_off_switch_leaves_meridian_serve_stock(demo_model, tmp_path, ours):
    """The same command serves, and an endpoint of ours says that there is nothing to switch."""
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "serve", str(demo_model)]
    with Server([*command, *ours], OFF | WRONG, tmp_path) as server:
        assert server.chat(QUESTION, max_tokens=20)["usage"]["completion_tokens"] > 0
        assert server.status() == []
        assert "TYPE meridian_" not in server.get("/metrics")
        with pytest.raises(HTTPError) as refused:
            server.get("/v1/meridian/policy")
        assert refused.value.code == HTTPStatus.CONFLICT
        assert b"the engine runs stock vLLM" in refused.value.read()
    assert "MERIDIAN_PATCH is 0: stock vLLM serves" in server.log.read_text()


@pytest.mark.nightly
def test_scheduler_cls_needs_no_activation(demo_model, tmp_path):
    """--scheduler-cls runs the phase scheduler in an engine where nothing is rebound."""
    job = Job(one_answer(demo_model, scheduler_cls=SCHEDULER_CLS), env=STOCK)
    stage = run_job(job, tmp_path)["stages"]["only"]
    assert stage["scheduler"][0] == "AsyncPhaseScheduler"
    assert "patches" not in stage["status"][0]
    assert phases_after_prefill(stage["runs"]["one"], "q") == ["think"]
    assert stage["runs"]["one"]["routed_left"] == 0
    assert stage["status"][0]["kv_tiers"] == "off"


@pytest.fixture(scope="module")
def tampered(tmp_path_factory) -> dict[str, str]:
    """Environment in which a copy of the package is found first, its lock out of date."""
    root = tmp_path_factory.mktemp("tampered")
    package = root / "meridian_patch"
    shutil.copytree(
        Path(meridian_patch.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("tiny-reasoner"),
    )
    for part in (meridian_patch.configs, meridian_patch.kernels):
        name = part.__name__.rpartition(".")[2]
        shutil.copytree(part.__path__[0], package / name, dirs_exist_ok=True)
    path = package / "patches" / "upstream_lock.json"
    lock = json.loads(path.read_text())
    for release in lock.values():
        scheduler = release["vllm.v1.core.sched.scheduler:Scheduler"]
        scheduler["parameters"]["schedule"] = "(self, a_parameter_of_another_release)"
    path.write_text(json.dumps(lock))
    return PATCHED | {"PYTHONPATH": f"{root}:{JOBS}"}


def test_a_mismatch_stops_the_server(demo_model, tampered, tmp_path):
    """A changed upstream signature ends a real server with one sentence, before it serves."""
    server = Server([*API_SERVER, "--model", str(demo_model)], tampered, tmp_path)
    code, has_served = server.run_to_its_end()
    log = server.log.read_text()
    assert code != 0
    assert not has_served
    refusals = [line for line in log.splitlines() if "PatchRefused: vLLM" in line]
    assert refusals
    assert "a_parameter_of_another_release" in refusals[0]
    assert "MERIDIAN_PATCH=0" in refusals[0]


@pytest.mark.nightly
def test_lenient_mode_serves_stock_and_says_so(demo_model, tampered, tmp_path):
    """With MERIDIAN_PATCH_MODE=lenient the same mismatch leaves a working stock engine."""
    env = tampered | {"MERIDIAN_PATCH_MODE": "lenient"}
    result = run_job(Job(one_answer(demo_model), env=env), tmp_path)
    stage = result["stages"]["only"]
    assert stage["scheduler"][0] == "Scheduler"
    assert sample(stage["runs"]["one"], "q")["ids"]
    outcomes = {patch["outcome"] for report in stage["status"] for patch in report["patches"]}
    assert outcomes
    assert "applied" not in outcomes
    assert "a_parameter_of_another_release" in (tmp_path / "log.txt").read_text()
