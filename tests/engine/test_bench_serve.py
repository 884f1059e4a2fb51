"""`meridian bench serve` on real servers: what it measures, and what it keeps when one dies."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from meridian_patch.envs import environment

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COMMAND = (sys.executable, "-P", "-m", "meridian_patch.cli", "bench", "serve")
LOAD = ("--arms", "stock,latency", "--requests", "20", "--rate", "8")


def start_bench(folder: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *LOAD, "--out", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A busy machine must not make a policy step count as slow and run as stock.
        env={**environment(), "MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US": "100000"},
    )


def first_server_of(bench: subprocess.Popen) -> int:
    """Process id of the first server, which is the first child."""
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
    deadline = time.monotonic() + 60
    while not (pids := children.read_text().split()):
        assert time.monotonic() < deadline, "no server was started"
        time.sleep(0.1)
    return int(pids[0])


def wait_for(line: str, log: Path) -> None:
    deadline = time.monotonic() + 240
    while not (log.exists() and line in log.read_text(errors="replace")):
        assert time.monotonic() < deadline, f"no {line!r} in {log}"
        time.sleep(0.1)


@pytest.mark.nightly
def test_pair_is_measured_and_reported(tmp_path):
    """Two servers, one trace: all requests end, and every figure has a ratio to stock."""
    bench = start_bench(tmp_path, "--pairs", "1")
    output, _ = bench.communicate(timeout=300)
    assert bench.returncode == 0, output
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["how"].startswith("measured-")
    assert data["load"]["processes"] == 2
    for arm in ("stock", "latency"):
        figures = data["arms"][arm]["by_seed"]["11"]
        assert figures["failed_requests"] == 0
        assert figures["accuracy"] > 0.8
        assert 0 < figures["ttft_p50_s"] < figures["ttfat_p50_s"] < figures["e2e_p50_s"]
    # Stock counts no phases, ours does: the arms are what they are called.
    assert data["arms"]["stock"]["by_seed"]["11"]["policy_fallbacks"] is None
    assert data["arms"]["latency"]["by_seed"]["11"]["policy_fallbacks"] == 0
    assert data["over_stock"]["latency"]["tokens_per_s"]["value"] > 0
    for words in ("latency / stock", "TTFAT p95", "worst answer gap"):
        assert words in output
    assert (tmp_path / "report.html").exists()


@pytest.mark.nightly
def test_turns_hit_the_prefix_cache(tmp_path):
    """Conversations on three servers: every later turn finds its history, and ample most of it."""
    turns = ("--workload", "turns", "--rate", "3", "--pause", "0.2", "--blocks", "129")
    arms = ("--arms", "stock,ample,patched", "--requests", "24", "--pairs", "1")
    bench = start_bench(tmp_path, *turns, *arms)
    output, _ = bench.communicate(timeout=400)
    assert bench.returncode == 0, output
    data = json.loads((tmp_path / "results.json").read_text())
    runs = {name: arm["by_seed"]["11"] for name, arm in data["arms"].items()}
    for figures in runs.values():
        assert figures["failed_requests"] == 0
        assert figures["accuracy"] > 0.8
        assert 0.2 < figures["hit_share"] <= runs["ample"]["hit_share"] + 0.02
    assert runs["stock"]["evictions_think_complete"] is None
    assert runs["patched"]["evictions_think_complete"] >= 0
    assert "avoidable_misses" in data["over_stock"]["patched"]
    for words in ("prefix hits, %", "hit tokens OUTPUT_CRITICAL", "TTFT p50, ms"):
        assert words in output


def cores_of(process: int) -> list[set[int]]:
    """Of the first thread, and of the others."""
    tasks = sorted(int(task.name) for task in Path(f"/proc/{process}/task").iterdir())
    return [os.sched_getaffinity(task) for task in tasks]


def engine_core_of(server: int) -> int:
    """Process id of a server's EngineCore."""
    for folder in Path("/proc").glob("[0-9]*"):
        # Others end while we look.
        with suppress(OSError):
            is_core = "VLLM::EngineCor" in (folder / "comm").read_text()
            if is_core and os.getpgid(int(folder.name)) == server:
                return int(folder.name)
    raise AssertionError(f"server {server} has no EngineCore")


def start_of(log: Path) -> str:
    """When a server's EngineCore first wrote to its log."""
    line = re.search(r"EngineCore pid=\d+\) \w+ (\d\d-\d\d [\d:]{8})", log.read_text())
    return line[1]


@pytest.mark.nightly
def test_servers_anew_for_each_pair(tmp_path):
    """Another one is the first to start each time, its EngineCore is alone on its core."""
    small = ("--arms", "stock,stock-again", "--requests", "6", "--pairs", "2")
    bench = start_bench(tmp_path, *small, "--restart")
    server = first_server_of(bench)
    wait_for("Resetting prefix cache", tmp_path / "server-stock-11.log")
    own, *others = cores_of(engine_core_of(server))
    if len(os.sched_getaffinity(0)) > 1:
        assert len(own) == 1
        assert not any(own & cores for cores in [*others, *cores_of(server)])
    output, _ = bench.communicate(timeout=300)
    assert bench.returncode == 0, output
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["over_stock"]["stock-again"]["tokens_per_s"]["value"] > 0
    started = {
        (name, seed): start_of(tmp_path / f"server-{name}-{seed}.log")
        for name in ("stock", "stock-again")
        for seed in (11, 12)
    }
    assert sorted(started, key=started.get) == [
        ("stock", 11),
        ("stock-again", 11),
        ("stock-again", 12),
        ("stock", 12),
    ]


@pytest.mark.nightly
def test_server_that_dies_leaves_the_others_results(tmp_path):
    """A killed server ends its arm with the log's last lines; the other arm plays on."""
    bench = start_bench(tmp_path, "--pairs", "2", "--rate", "4")
    server = first_server_of(bench)
    wait_for("Resetting prefix cache", tmp_path / "server-stock.log")
    # By then the clients send: the trace lasts some seconds.
    time.sleep(3)
    os.kill(server, signal.SIGKILL)
    output, _ = bench.communicate(timeout=120)
    assert bench.returncode == 1
    assert "stock: the vLLM server ended with exit code -9" in output
    assert "the last lines:" in output
    assert "Traceback (most recent call last)" not in output
    arms = json.loads((tmp_path / "results.json").read_text())["arms"]
    assert arms["stock"]["is_partial"]
    assert "server-stock.log; the last lines:" in arms["stock"]["error"]
    assert arms["latency"]["error"] is None
    for seed in ("11", "12"):
        assert arms["latency"]["by_seed"][seed]["failed_requests"] == 0
        assert arms["latency"]["by_seed"][seed]["tokens_per_s"] > 0
