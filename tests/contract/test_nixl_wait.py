"""NIXL's own agent, and the one whose thread waits for events."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from handoff_runs import needs_nixl
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

from meridian_patch.config.schema import HandoffConfig
from meridian_patch.engine.handoff import nixl_wait


def config_of(connector: str | None, **extra) -> SimpleNamespace:
    """An engine's configuration with this connector, on a CPU."""
    transfer = connector and KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config=extra,
    )
    return SimpleNamespace(kv_transfer_config=transfer)


NIXL_CONFIG = config_of("NixlConnector")

# Builds an agent in a process of its own, and prints how its thread waits and what it costs idle.
JOB = """
import json, sys, time
from nixl import nixl_agent, nixl_agent_config
from meridian_patch.engine.handoff.nixl_wait import build_waiting_agent

bindings = sys.modules[nixl_agent.__module__].nixlBind
original, build, seen = bindings.nixlAgentConfig, bindings.nixlAgent, []

def noted(name, config):
    seen.append(config.pthrDelay)
    return build(name, config)

bindings.nixlAgent = noted
wait_ms = int(sys.argv[1])
kind = build_waiting_agent(nixl_agent, bindings, wait_ms) if wait_ms else nixl_agent
agent = kind("agent", nixl_agent_config(num_threads=4, capture_telemetry=True))
began = time.process_time()
time.sleep(1.5)
share = (time.process_time() - began) / 1.5
print(json.dumps({"us": seen, "share": share, "is_back": bindings.nixlAgentConfig is original}))
"""


def agent_that_waits(wait_ms: int) -> dict:
    command = [sys.executable, "-P", "-c", JOB, str(wait_ms)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return json.loads(ended.stdout.splitlines()[-1])


@needs_nixl
def test_a_thread_that_waits_leaves_the_core_to_others():
    """Stock's asks without a pause; ours is told to wait, and everything else is as it was."""
    stock, waiting = agent_that_waits(0), agent_that_waits(2)
    assert stock["us"] == [0]
    assert waiting["us"] == [2000]
    assert waiting["is_back"]
    assert waiting["share"] < 0.5 * stock["share"]


@pytest.mark.parametrize(
    ("options", "buffer_device", "wait_ms"),
    [
        ({"role": "think"}, "cpu", 1),
        ({"role": "answer"}, "cpu", 1),
        ({"role": "think"}, "cuda", 0),
        ({}, "cpu", 0),
        ({"nixl_wait_ms": 5}, "cuda", 5),
        ({"role": "think", "nixl_wait_ms": 0}, "cpu", 0),
    ],
)
def test_who_waits(options, buffer_device, wait_ms):
    """Engines with a role whose blocks are in the host's memory, and those that are told to."""
    assert nixl_wait.wait_for(HandoffConfig(**options), buffer_device) == wait_ms


@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        (None, {}),
        ("MooncakeConnector", {}),
        ("OffloadingConnector", {}),
        ("NixlConnector", {"backends": ["LIBFABRIC"]}),
    ],
)
def test_others_are_left_alone(connector, extra, monkeypatch):
    """Other connectors, and libraries whose thread no event wakes."""
    agent = agent_of(monkeypatch, {"pthrDelay": 0})
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__NIXL_WAIT_MS", "1")
    monkeypatch.setattr(base_worker, "NixlWrapper", agent)
    nixl_wait.let_nixl_wait(config_of(connector, **extra))
    assert base_worker.NixlWrapper is agent


def test_the_connector_looks_the_agent_up_when_it_is_built():
    """So that a name bound before that takes effect."""
    names = base_worker.NixlBaseConnectorWorker.__init__.__code__.co_names
    assert "NixlWrapper" in names
    assert "sched_setaffinity" in names  # see `let_run_on_all_cores` of the engines' tests


def test_the_connector_gets_an_agent_that_waits_once(monkeypatch):
    """A second worker of the process does not wrap it again."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__ROLE", "think")
    monkeypatch.setattr(base_worker, "NixlWrapper", agent_of(monkeypatch, {"pthrDelay": 0}))
    nixl_wait.let_nixl_wait(NIXL_CONFIG)
    first = base_worker.NixlWrapper
    nixl_wait.let_nixl_wait(NIXL_CONFIG)
    assert base_worker.NixlWrapper is first
    assert first().config.pthrDelay == 1000


def test_another_release_of_nixl_is_left_alone(monkeypatch):
    """One without the setting is said, and works as it does."""
    agent = agent_of(monkeypatch, {})
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__ROLE", "answer")
    monkeypatch.setattr(base_worker, "NixlWrapper", agent)
    warned = []
    monkeypatch.setattr(nixl_wait.logger, "warning", lambda text, *args: warned.append(text % args))
    nixl_wait.let_nixl_wait(NIXL_CONFIG)
    assert base_worker.NixlWrapper is agent
    assert "no setting pthrDelay" in warned[0]


def agent_of(monkeypatch, fields) -> type:
    """An agent whose constructor does as NIXL's, with such a configuration."""
    bindings = SimpleNamespace(nixlAgentConfig=type("nixlAgentConfig", (), fields))
    monkeypatch.setitem(sys.modules, "agents_of_a_test", SimpleNamespace(nixlBind=bindings))

    class Agent:
        def __init__(self):
            self.config = bindings.nixlAgentConfig()
            self.config.pthrDelay = 0

    Agent.__module__ = "agents_of_a_test"
    return Agent
