"""Lets the thread of NIXL's agent wait for events, instead of asking for them without a pause.

NIXL's Python package sets the time that its progress thread waits for an event to 0, so the thread
takes all the time of a processor core that it can get. On a machine with few cores it takes it from
the engine. With UCX an event ends the wait; one that UCX loses costs at most the wait.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from vllm.logger import init_logger

from meridian_patch import envs
from meridian_patch.config.load import load_config
from meridian_patch.config.schema import HandoffConfig

logger = init_logger("vllm.meridian_patch")

_CONNECTORS: Final = ("NixlConnector", "NixlPullConnector")
_DEFAULT_WAIT_MS: Final = 1
# Load-bearing: of NIXL's libraries, the only one whose thread an event wakes; others sleep so long.
_BACKENDS: Final = ["UCX"]
# Load-bearing: fields of NIXL's configuration of an agent. The thread's time is in microseconds,
# and UCX's thread rounds it up to whole milliseconds.
_CONFIGURATION, _WAIT = "nixlAgentConfig", "pthrDelay"


def let_nixl_wait(vllm_config: Any) -> None:
    """Bind a subclass of NIXL's agent for the connector of this engine, if it is to wait.

    Call it in a worker's process, before its connector is built.

    Raises:
        ConfigError: the configuration is wrong.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector not in _CONNECTORS:
        return
    if transfer.get_from_extra_config("backends", _BACKENDS) != _BACKENDS:
        return
    config = load_config(envs.environment()).config.handoff
    wait_ms = wait_for(config, transfer.kv_buffer_device)
    if not wait_ms:
        return
    # Only an engine with this connector imports it.
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    # Load-bearing: the connector's worker looks this name up when it is built.
    agent = base_worker.NixlWrapper
    if agent is None or getattr(agent, "waits", False):
        return
    bindings = getattr(sys.modules[agent.__module__], "nixlBind", None)
    if not hasattr(getattr(bindings, _CONFIGURATION, None), _WAIT):
        logger.warning(
            "meridian_patch: NIXL's thread asks for events without a pause, and takes a processor "
            "core: this release of the package nixl has no setting %s; expected 1.0 or newer",
            _WAIT,
        )
        return
    base_worker.NixlWrapper = build_waiting_agent(agent, bindings, wait_ms)


def wait_for(config: HandoffConfig, buffer_device: str | None) -> int:
    """Milliseconds that NIXL's thread waits for an event; 0: it asks without a pause.

    Args:
        config: of hand-offs.
        buffer_device: where the connector reads and writes KV blocks.
    """
    if config.nixl_wait_ms is not None:
        return config.nixl_wait_ms
    return _DEFAULT_WAIT_MS if config.role != "none" and buffer_device == "cpu" else 0


def build_waiting_agent(original: type, bindings: Any, wait_ms: int) -> type:
    """``original``, NIXL's agent, whose thread waits.

    Args:
        original: the agent.
        bindings: module in which its constructor looks up the configuration's class.
        wait_ms: how long it waits for an event.
    """

    class WaitingAgent(original):
        waits = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _waiting(bindings, wait_ms):
                super().__init__(*args, **kwargs)

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
