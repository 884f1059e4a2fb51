"""Alerts that need a fault of the machine or of the plug-in: fired, and ended as runbooks say.

tests/engine/test_wire_watched.py has those of overload.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager

import pytest
from clients import clients
from core_reports import THINK_END_ID
from engine_plans import PROBING
from faulty_parts import faults_environment
from run_engine import PATCHED, STOCK
from run_prometheus import Prometheus
from run_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

VOCABULARY = 264
# What the runbooks of thoughts that are too long say.
BOUNDED = {
    "meridian_exit": "enforce",
    "meridian_max_think_tokens": 8,
    "meridian_min_think_tokens": 0,
}
LONG_ANSWER = {"ignore_eos": True, "max_tokens": 700, "vllm_xargs": BOUNDED}
LONG_THOUGHT = {
    "ignore_eos": True,
    "max_tokens": 500,
    "logit_bias": {str(THINK_END_ID): -100},
}
# A thought that cannot end, and whose close is refused for that reason.
REFUSED = {
    "allowed_token_ids": [token for token in range(VOCABULARY) if token != THINK_END_ID],
    "max_tokens": 60,
    "vllm_xargs": BOUNDED,
}


@pytest.fixture
def start(demo_model, tmp_path):
    """``start(name, env)``: a server by the name of m."""

    def command(name, env):
        program = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        program += ["--model", str(demo_model), "--served-model-name", "m"]
        return Server(program, env, tmp_path / name)

    return command


@contextmanager
def watched(server, folder):
    """Prometheus, which scrapes this server first; it need not run yet."""
    with Prometheus(address(server), folder / "prometheus") as prometheus:
        yield prometheus


def address(server):
    return f"127.0.0.1:{server.port}"


def fires(prometheus, *names):
    """All of them do at the same time."""
    has_come = prometheus.wait(lambda p: set(p.alerts()) >= set(names), 60)
    assert has_come, set(prometheus.alerts())


def ends(prometheus, *names, limit_s=60):
    """None of them fires any more."""
    has_ended = prometheus.wait(lambda p: not set(p.alerts()) & set(names), limit_s)
    assert has_ended, set(prometheus.alerts())


def stays_silent(prometheus, *names, seconds=15):
    """None of them fires while a server that is scraped is asked; longer than any of them waits."""
    assert prometheus.wait(lambda p: [up for _, up in p.ask("up")] == [1.0], 30)
    assert not prometheus.wait(lambda p: set(p.alerts()) & set(names), seconds)


def test_a_server_without_the_plugin(start, tmp_path):
    """Fired by a stock server; ended by its start with VLLM_PLUGINS=meridian_patch."""
    stock, patched = start("stock", STOCK), start("patched", PATCHED)
    with watched(stock, tmp_path) as prometheus:
        with stock, clients(stock, 4):
            fires(prometheus, "MeridianNotActive")
        prometheus.scrape(address(patched))
        with patched, clients(patched, 4):
            ends(prometheus, "MeridianNotActive", limit_s=10)
            stays_silent(prometheus, "MeridianNotActive")


def test_parts_that_fail(start, tmp_path):
    """Slow decisions end with the load; a part that is off, and lost signals, with a restart."""
    folder = tmp_path / "faults"
    env = faults_environment(folder) | PROBING
    slow, tiers, lost = (folder / name for name in ("slow", "tiers", "lost"))
    server, again = start("faulty", env), start("again", env)
    with watched(server, tmp_path) as prometheus:
        with server, clients(server, 6):
            slow.touch()
            fires(prometheus, "MeridianStepsFallBack")
            slow.unlink()
            ends(prometheus, "MeridianStepsFallBack")
            tiers.touch()
            lost.touch()
            fires(prometheus, "MeridianPartOff", "MeridianSignalsLost")
            (part,) = prometheus.alerts()["MeridianPartOff"]
            assert part["annotations"]["summary"] == "the KV tiers: off until restart"
        tiers.unlink()
        lost.unlink()
        prometheus.scrape(address(again))
        with again, clients(again, 6):
            ends(prometheus, "MeridianPartOff", "MeridianSignalsLost")
            stays_silent(prometheus, "MeridianPartOff", "MeridianSignalsLost")


def test_requests_that_outgrow_the_cache(start, tmp_path):
    """Thoughts, then answers; ended by bounds for thoughts, and by shorter answers."""
    server = start("outgrown", PATCHED)
    with watched(server, tmp_path) as prometheus, server:
        with clients(server, 16, aborts=True, **LONG_THOUGHT):
            fires(prometheus, "MeridianThinkingPreempted")
        with clients(server, 6, **LONG_THOUGHT | {"vllm_xargs": BOUNDED, "max_tokens": 50}):
            ends(prometheus, "MeridianThinkingPreempted")
        with clients(server, 8, aborts=True, **LONG_ANSWER):
            fires(prometheus, "MeridianAnswersPreempted")
        with clients(server, 8, **LONG_ANSWER | {"max_tokens": 50}):
            ends(prometheus, "MeridianAnswersPreempted")


def test_closes_that_are_refused(start, tmp_path):
    """Ended by clients that leave out what undoes a close."""
    server = start("refused", PATCHED)
    with watched(server, tmp_path) as prometheus, server:
        with clients(server, 6, **REFUSED):
            fires(prometheus, "MeridianClosesRefused")
        with clients(server, 6, vllm_xargs=BOUNDED):
            ends(prometheus, "MeridianClosesRefused")


@contextmanager
def core_stolen(server):
    """Another load: EngineCore gets no core for a second, again and again."""
    done = threading.Event()
    process = engine_core_of(server)

    def steal():
        while not done.wait(0.5):
            os.kill(process, signal.SIGSTOP)
            done.wait(1.3)
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=steal)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def engine_core_of(server) -> int:
    """Process id of the server's EngineCore."""
    (core,) = [each["pid"] for each in server.status() if each["role"] == "engine_core"]
    return core


def test_another_load_on_the_machine(start, tmp_path):
    """Ended as it is taken off."""
    both = "MeridianAnswersStall", "MeridianStepTimesOff"
    server = start("stolen", PATCHED)
    with watched(server, tmp_path) as prometheus, server, clients(server, 4):
        with core_stolen(server):
            fires(prometheus, *both)
        ends(prometheus, *both)
