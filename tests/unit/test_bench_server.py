"""How a server process is started, watched and ended; the program is a stand-in for any server."""

import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from meridian_patch.bench.served.arms import KNOWN_ARMS, arm_environment
from meridian_patch.bench.served.client import Client
from meridian_patch.bench.served.server import (
    ServerProcess,
    ServerSettings,
    pick_port,
    server_environment,
)
from meridian_patch.bench.served.workload import Mix, make_trace
from meridian_patch.errors import BenchError

HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
ENDS = "import sys; [print('line', n) for n in range(30)]; sys.exit(3)"
NEVER_HEALTHY = "import time; print('loading', flush=True); time.sleep(600)"


@dataclass(frozen=True)
class Program(ServerSettings):
    code: str = ""

    def arguments(self, port: int) -> list[str]:
        return [sys.executable, "-c", self.code, str(port)]


def server(code: str, folder: Path, limit_s: float = 30.0) -> ServerProcess:
    settings = Program(Path("/none"), 80, code=code)
    return ServerProcess(settings, {}, folder / "server.log", pick_port(), limit_s)


def is_running(pid: int) -> bool:
    """True unless the process is gone or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_whole_group_ends_on_exit(tmp_path):
    """Leaving the block ends the server and what it started."""
    with server(HEALTHY, tmp_path) as running:
        running.wait_until_healthy()
        running.check_alive()
        pid = running.pid
        child = int((tmp_path / "server.log").read_text().split()[1])
        assert is_running(pid)
        assert is_running(child)
    assert wait_until_gone(pid)
    assert wait_until_gone(child)


def test_whole_group_ends_on_an_error_inside(tmp_path):
    """Ctrl-C inside the block leaves no server behind."""
    with pytest.raises(KeyboardInterrupt), server(HEALTHY, tmp_path) as running:
        pid = running.pid
        raise KeyboardInterrupt
    assert wait_until_gone(pid)


def test_server_that_ends_gives_its_last_lines(tmp_path):
    """A server that ends while starting is an error with its exit code and last 20 log lines."""
    with (
        pytest.raises(BenchError, match="ended with exit code 3") as caught,
        server(ENDS, tmp_path) as starting,
    ):
        starting.wait_until_healthy()
    lines = str(caught.value).splitlines()
    assert lines[1:] == [f"line {n}" for n in range(10, 30)]


def test_server_that_never_gets_healthy_is_ended(tmp_path):
    """After the time limit the server is ended and the error says how long it had."""
    with server(NEVER_HEALTHY, tmp_path, limit_s=0.5) as starting:
        with pytest.raises(BenchError, match="not healthy after 0 s"):
            starting.wait_until_healthy()
        assert wait_until_gone(starting.pid)


def test_interrupt_while_starting_ends_the_server(tmp_path):
    """Ctrl-C during the start ends the server."""

    def interrupt(_waited_s: float) -> None:
        raise KeyboardInterrupt

    settings = Program(Path("/none"), 80, code=NEVER_HEALTHY)
    starting = ServerProcess(settings, {}, tmp_path / "server.log", pick_port(), on_wait=interrupt)
    with starting:
        with pytest.raises(KeyboardInterrupt):
            starting.wait_until_healthy()
        assert wait_until_gone(starting.pid)


def test_taken_port_is_named():
    """A port that is in use is refused by number."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BenchError, match=f"port {port} on 127.0.0.1 cannot be used"):
            pick_port(port)


def test_server_is_started_off_the_working_directory():
    """-P stands before the module, so that no folder of the working directory is importable."""
    arguments = ServerSettings(Path("/m"), 80).arguments(8000)
    assert arguments[1:3] == ["-P", "-m"]
    assert "--num-gpu-blocks-override 80" in " ".join(arguments)


def test_users_environment_wins_over_defaults():
    """What the user exported is kept; what is missing is filled in."""
    env = server_environment({"VLLM_CPU_KVCACHE_SPACE": "4", "HOME": "/h"})
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert env["HOME"] == "/h"
    assert env["OMP_NUM_THREADS"] == "1"


def test_the_engine_has_a_core_of_its_own(monkeypatch):
    """The last one; with one core there is no choice, and with many no need."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 5})
    assert server_environment({})["VLLM_CPU_OMP_THREADS_BIND"] == "5"
    for cores in ({5}, set(range(16))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: cores)
        assert server_environment({})["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize("arm", KNOWN_ARMS)
def test_activation_is_the_arms_own(arm):
    """Whatever activation is inherited, an arm has its own; other settings pass through."""
    base = {"MERIDIAN_PATCH": "1", "VLLM_PLUGINS": "meridian_patch", "MERIDIAN_PATCH_CONFIG": "c"}
    env = arm_environment(KNOWN_ARMS[arm].environment, base)
    is_stock = arm in {"stock", "stock-again", "ample"}
    assert env["MERIDIAN_PATCH"] == ("0" if is_stock else "1")
    assert env.get("VLLM_PLUGINS") == ("" if is_stock else None)
    assert env["MERIDIAN_PATCH_CONFIG"] == "c"


def test_refused_connection_is_noted_in_the_record():
    """A request that cannot be sent ends as failed and does not break the others off."""
    records = []
    trace = make_trace(Mix(3, 1000.0), 1)
    Client(f"http://127.0.0.1:{pick_port()}", "m").play(trace, records)
    assert len(records) == 3
    assert all("Connect" in record.error for record in records)


def test_dead_server_ends_the_trace_at_once():
    """What the check of the server raises ends a trace that would go on for long."""

    def dead() -> None:
        raise BenchError("the vLLM server ended")

    trace = make_trace(Mix(50, 0.1), 1)
    begin = time.monotonic()
    with pytest.raises(BenchError, match="the vLLM server ended"):
        Client(f"http://127.0.0.1:{pick_port()}", "m").play(trace, [], dead)
    assert time.monotonic() - begin < 5
