"""Lets the thread of NIXL's agent wait for events, instead of asking for them without a pause.

NIXL's Python package sets the time that its progress thread waits for an event to 0, so the thread
takes all the time of a processor core that it can get. On a machine with few cores it takes it from
the engine. With UCX an event ends the wait; one that UCX loses costs at most the wait.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from vllm.logger import init_logger

from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.config.load import process_config
from meridian_patch.engine.handoff.layout import NIXL_CONNECTORS

logger = init_logger("vllm.meridian_patch")

_WORKER: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
_DEFAULT_WAIT_MS: Final = 1
# Load-bearing: of NIXL's libraries, the only one whose thread an event wakes; others sleep so long.
_BACKENDS: Final = ["UCX"]
# Load-bearing: fields of NIXL's configuration of an agent. The thread's time is in microseconds,
# and UCX's thread rounds it up to whole milliseconds.
_CONFIGURATION, _WAIT = "nixlAgentConfig", "pthrDelay"


def let_nixl_wait(vllm_config: Any) -> None:
    """Bind the agent for the connector of this engine: one that waits, or NIXL's own.

    Call it in a worker's process, before its connector is built.

    Raises:
        ConfigError: the configuration is wrong.
    """
    let_nixl_poll()
    config = process_config().config.handoff
    wait_ms = wait_for(config, vllm_config.kv_transfer_config)
    if not wait_ms:
        return
    # Only an engine with this connector imports it.
    worker: Any = importlib.import_module(_WORKER)
    # Load-bearing: the connector's worker looks this name up when it is built.
    agent = worker.NixlWrapper
    if agent is None:
        return
    bindings = getattr(sys.modules[agent.__module__], "nixlBind", None)
    if not hasattr(getattr(bindings, _CONFIGURATION, None), _WAIT):
        logger.warning(
            "meridian_patch: NIXL's thread asks for events without a pause, and takes what it can "
            "get of a core: this release of the package nixl has no setting %s; expected 1.0 or "
            "newer",
            _WAIT,
        )
        return
    worker.NixlWrapper = build_waiting_agent(agent, bindings, wait_ms)


def let_nixl_poll() -> None:
    """Bind NIXL's own agent again; agents that exist go on as they are."""
    worker = sys.modules.get(_WORKER)
    original = getattr(getattr(worker, "NixlWrapper", None), "original", None)
    if original is not None:
        vars(worker)["NixlWrapper"] = original


def wait_for(config: HandoffConfig, transfer: Any) -> int:
    """Milliseconds that NIXL's thread waits for an event; 0: it asks without a pause.

    Args:
        config: of hand-offs.
        transfer: the configuration of the engine's KV connector; None without one.
    """
    if transfer is None or transfer.kv_connector not in NIXL_CONNECTORS:
        return 0
    if transfer.get_from_extra_config("backends", _BACKENDS) != _BACKENDS:
        return 0
    if config.nixl_wait_ms is not None:
        return config.nixl_wait_ms
    return _DEFAULT_WAIT_MS if config.role != "none" and transfer.kv_buffer_device == "cpu" else 0


def build_waiting_agent(original: type, bindings: Any, wait_ms: int) -> type:
    """``original``, NIXL's agent, whose thread waits.

    Args:
        original: the agent.
        bindings: module in which its constructor looks up the configuration's class.
        wait_ms: how long it waits for an event.
    """

    class WaitingAgent(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _waiting(bindings, wait_ms):
                super().__init__(*args, **kwargs)

    WaitingAgent.original = original
    return WaitingAgent


@contextmanager
def _waiting(bindings: Any, wait_ms: int) -> Iterator[None]:
    """Replace the configuration's class by one that waits at least so long."""
    original = getattr(bindings, _CONFIGURATION)
    setattr(bindings, _CONFIGURATION, _waiting_configuration(original, wait_ms))
    try:
        yield
    finally:
        setattr(bindings, _CONFIGURATION, original)


def _waiting_configuration(original: type, wait_ms: int) -> type:
    class WaitingConfiguration(original):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, max(value, 1000 * wait_ms) if name == _WAIT else value)

    return WaitingConfiguration
