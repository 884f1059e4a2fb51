"""The demo on real servers: what it measures, and what it leaves when it is broken off."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from meridian_patch.bench.served.capacity import CAPACITY_SHARE
from meridian_patch.envs import environment

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COMMAND = (sys.executable, "-P", "-m", "meridian_patch.demo.run")


def start_demo(folder: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, "--out", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A busy machine must not make a policy step count as slow and run as stock.
        env={**environment(), "MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US": "100000"},
    )


def server_of(demo: subprocess.Popen) -> int:
    """Process id, and so group id, of the server that the demo started."""
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # Not any child: some tell about the machine, and are gone at once.
        for pid in children.read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):
                if b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        time.sleep(0.1)
    raise AssertionError("the demo started no server")


def wait_for(line: str, log: Path) -> None:
    deadline = time.monotonic() + 240
    while not (log.exists() and line in log.read_text(errors="replace")):
        assert time.monotonic() < deadline, f"no {line!r} in {log}"
        time.sleep(0.1)


def group_is_gone(group: int) -> bool:
    """True when nothing of the process group runs; unreaped dead processes do not count."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        listed = subprocess.run(
            ["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True
        )
        rows = [row.split() for row in listed.stdout.splitlines()]
        if not [row for row in rows if row[0] == str(group) and not row[1].startswith("Z")]:
            return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory) -> tuple[str, Path]:
    """The demo's load, one trace of it, on two servers of an emulated GPU; output and folder.

    ``noop`` schedules as stock does, and counts preempted answers, too.
    """
    folder = tmp_path_factory.mktemp("demo")
    device = ("--emulate", "h100-32b-dense", "--emulate-beside-gpu")
    demo = start_demo(folder, "--arms", "noop,patched", "--seeds", "1", *device)
    output, _ = demo.communicate(timeout=480)
    assert demo.returncode == 0, output
    return output, folder


def results_of(demo_run) -> dict:
    return json.loads((demo_run[1] / "results.json").read_text())


def arm_of(demo_run, name: str) -> dict:
    [figures] = results_of(demo_run)["arms"][name]["by_seed"].values()
    return figures


def test_answers_are_spared(demo_run):
    """Stock preempts answers under this pressure, and they stand still; patched spares them.

    Not always all of them: when answers alone fill the pool, one of them must make room.
    """
    noop, patched = (arm_of(demo_run, name) for name in ("noop", "patched"))
    assert noop["answer_preemptions"] > 0
    assert 4 * patched["answer_preemptions"] <= noop["answer_preemptions"]
    assert 2 * patched["answer_pauses_s"] < noop["answer_pauses_s"]


def test_later_turns_come_as_long_after_the_answer_as_tokens_take(demo_run):
    """The servers are asked first what a token takes, and the trace that was played has pauses."""
    data = results_of(demo_run)
    assert 0.0005 < data["token_s"] < 1
    trace = [json.loads(line) for line in (demo_run[1] / "trace-61.jsonl").open()]
    pauses = [request["arrival_s"] for request in trace if request["follows"]]
    assert 20 < statistics.fmean(pauses) / data["token_s"] < 1000
    assert "pauses of 180 tokens on average" in data["workload"]


def test_every_request_is_answered_right(demo_run):
    """All streams end, and the tiny reasoner is right far above chance in all arms."""
    for name in ("noop", "patched"):
        assert results_of(demo_run)["arms"][name]["error"] is None
        figures = arm_of(demo_run, name)
        assert figures["failed_requests"] == 0
        assert figures["accuracy"] > 0.9
        assert 0 < figures["ttft_p50_s"] < figures["ttfat_p50_s"] < figures["e2e_p50_s"]
        assert not figures["policy_fallbacks"]


def test_table_and_report_are_shown(demo_run):
    """The output ends in the table and the path of a page that holds its plots."""
    output, folder = demo_run
    for words in ("answers stood still", "worst answer gap", "TTFAT mean", "noop", "patched"):
        assert words in output
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "emulated h100-32b-dense (derived)" in page
    assert "Emulated device, " in output
    assert results_of(demo_run)["how"] == "emulated h100-32b-dense (derived)"


@pytest.mark.nightly
def test_the_load_is_what_this_machine_can_take(tmp_path):
    """With --rate auto, a share of what stock completes here, and the report says so."""
    options = ("--arms", "noop", "--workload", "problems", "--requests", "20", "--rate", "auto")
    options += ("--seeds", "1")
    demo = start_demo(tmp_path, "--bare", *options)
    output, _ = demo.communicate(timeout=480)
    assert demo.returncode == 0, output
    said = json.loads((tmp_path / "results.json").read_text())["workload"]
    rate = float(re.search(r"([\d.]+) per second in bursts", said)[1])
    capacity = float(re.search(r"Stock completes ([\d.]+) per second here", said)[1])
    assert rate == pytest.approx(CAPACITY_SHARE * capacity, rel=0.01)
    arrivals = [json.loads(line)["arrival_s"] for line in (tmp_path / "trace-61.jsonl").open()]
    assert 0.2 < len(arrivals) / rate / arrivals[-1] < 5


@pytest.mark.nightly
def test_server_that_dies_mid_run_leaves_a_report(tmp_path):
    """A killed server ends its arm with the log's last lines; what it served is reported."""
    demo = start_demo(tmp_path, "--bare", "--arms", "noop", "--requests", "60", "--rate", "2")
    server = server_of(demo)
    # The third trace request at the earliest: warm-up requests come before the metrics are read.
    wait_for("Resetting prefix cache", tmp_path / "server-noop.log")
    time.sleep(5)
    os.killpg(server, signal.SIGKILL)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "the vLLM server ended with exit code -9" in output
    arm = json.loads((tmp_path / "results.json").read_text())["arms"]["noop"]
    assert arm["is_partial"]
    assert "the last lines:" in arm["error"]
    assert arm["by_seed"]["61"]["tokens_per_s"] > 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_no_server(tmp_path, number):
    """Ctrl-C and a polite kill while the server starts end the demo and all of the server."""
    # With a rate the first server is the arm's: none measures what the machine can take.
    demo = start_demo(tmp_path, "--bare", "--arms", "stock", "--rate", "1")
    server = server_of(demo)
    wait_for("EngineCore", tmp_path / "server-stock.log")
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "stock: interrupted" in output
    assert "Traceback" not in output
    assert group_is_gone(server)
