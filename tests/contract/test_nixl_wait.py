"""NIXL's own agent, and the one whose thread waits for events."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from handoff_runs import needs_nixl
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

from meridian_patch.apply import undo_patches
from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.engine.handoff import nixl_wait


def config_of(connector: str | None, device: str = "cpu", **extra) -> SimpleNamespace:
    """An engine's configuration with this connector, on such a device."""
    transfer = connector and KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_buffer_device=device,
        kv_connector_extra_config=extra,
    )
    return SimpleNamespace(kv_transfer_config=transfer)


NIXL, MOONCAKE = config_of("NixlConnector"), config_of("MooncakeConnector")

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


def start_agent(wait_ms: int) -> subprocess.Popen:
    command = [sys.executable, "-P", "-c", JOB, str(wait_ms)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.nightly
@needs_nixl
def test_a_thread_that_waits_leaves_the_core_to_others():
    """Stock's asks without a pause; ours is told to wait, and everything else is as it was.

    Both at once: what else the machine does, it does to both.
    """
    agents = [start_agent(wait_ms) for wait_ms in (0, 2)]
    said = [agent.communicate(timeout=120)[0] for agent in agents]
    stock, waiting = (json.loads(text.splitlines()[-1]) for text in said)
    assert stock["us"] == [0]
    assert waiting["us"] == [2000]
    assert waiting["is_back"]
    assert waiting["share"] < 0.5 * stock["share"]


@pytest.mark.parametrize(
    ("options", "connector", "extra", "wait_ms"),
    [
        ({"role": "think"}, "NixlConnector", {}, 1),
        ({"role": "answer"}, "NixlPullConnector", {}, 1),
        ({"role": "think"}, "NixlConnector", {"backends": ["UCX"]}, 1),
        ({"role": "think"}, "NixlConnector", {"device": "cuda"}, 0),
        ({}, "NixlConnector", {}, 0),
        ({"nixl_wait_ms": 5}, "NixlConnector", {"device": "cuda"}, 5),
        ({"role": "think", "nixl_wait_ms": 0}, "NixlConnector", {}, 0),
        ({"nixl_wait_ms": 5}, "NixlConnector", {"backends": ["LIBFABRIC"]}, 0),
        ({"nixl_wait_ms": 5}, "MooncakeConnector", {}, 0),
        ({"nixl_wait_ms": 5}, None, {}, 0),
    ],
)
def test_who_waits(options, connector, extra, wait_ms):
    """Engines with a role whose blocks are in the host's memory, and those that are told to.

    Not other connectors, nor libraries whose thread no event wakes.
    """
    transfer = config_of(connector, **extra).kv_transfer_config
    assert nixl_wait.wait_for(HandoffConfig(**options), transfer) == wait_ms


def test_the_connector_looks_the_agent_up_when_it_is_built():
    """So that a name bound before that takes effect."""
    names = base_worker.NixlBaseConnectorWorker.__init__.__code__.co_names
    assert "NixlWrapper" in names
    assert "sched_setaffinity" in names  # see `let_run_on_all_cores` of the engines' tests


def test_each_engine_of_a_process_gets_its_own_agent(monkeypatch):
    """The engine before it decides nothing."""
    agent = agent_of(monkeypatch, {"pthrDelay": 0})
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__ROLE", "think")
    monkeypatch.setattr(base_worker, "NixlWrapper", agent)
    waits = []
    for wait_ms, config in ((5, NIXL), (20, NIXL), (0, NIXL), (7, NIXL), (7, MOONCAKE)):
        monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__NIXL_WAIT_MS", str(wait_ms))
        nixl_wait.let_nixl_wait(config)
        waits.append(base_worker.NixlWrapper().config.pthrDelay)
    assert waits == [5000, 20000, 0, 7000, 0]
    assert base_worker.NixlWrapper is agent


def test_undo_binds_nixls_own_agent(monkeypatch):
    """It is bound for an engine, and no site of a patch."""
    agent = agent_of(monkeypatch, {"pthrDelay": 0})
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__ROLE", "think")
    monkeypatch.setattr(base_worker, "NixlWrapper", agent)
    nixl_wait.let_nixl_wait(NIXL)
    assert base_worker.NixlWrapper is not agent
    undo_patches()
    assert base_worker.NixlWrapper is agent


def test_another_release_of_nixl_is_left_alone(monkeypatch):
    """One without the setting is said, and works as it does."""
    agent = agent_of(monkeypatch, {})
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__ROLE", "answer")
    monkeypatch.setattr(base_worker, "NixlWrapper", agent)
    warned = []
    monkeypatch.setattr(nixl_wait.logger, "warning", lambda text, *args: warned.append(text % args))
    nixl_wait.let_nixl_wait(NIXL)
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
