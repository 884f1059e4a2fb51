"""What engines that hand requests off must have in common, and which connectors can do it."""

from typing import Any, Final

from meridian_patch.errors import ConfigError
from meridian_patch.handoff.ticket import KVLayout

CONNECTORS: Final = ("NixlConnector", "NixlPullConnector", "MooncakeConnector")
"""Connectors of vLLM that let another engine read a finished request's KV cache."""


def layout_of(vllm_config: Any) -> KVLayout:
    """The layout of an engine's KV cache."""
    return KVLayout(
        model=str(vllm_config.model_config.model),
        block_size=vllm_config.cache_config.block_size,
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        dtype=str(vllm_config.model_config.dtype),
    )


def check_connector(scheduler: Any, role: str) -> None:
    """Refuse an engine whose connector cannot hand requests off.

    Raises:
        ConfigError: the message names the role, what was found and what to do.
    """
    transfer = scheduler.vllm_config.kv_transfer_config
    found = transfer.kv_connector if transfer is not None else None
    if found not in CONNECTORS:
        raise ConfigError(
            f"handoff.role is {role!r}, and the engine's KV connector is {found or 'none'}, "
            f"expected one of {', '.join(CONNECTORS)}; start it with 'meridian serve --role {role}'"
        )
    side = getattr(scheduler.connector, "connector_scheduler", None)
    if getattr(side, "use_host_buffer", False):
        raise ConfigError(
            f"handoff.role is {role!r}, and the KV connector copies through the host's memory "
            "(kv_buffer_device is 'cpu'), which saves no generated token; expected the device's "
            "own memory"
        )
    if scheduler.kv_cache_config.has_mamba_layers:
        raise ConfigError(
            f"handoff.role is {role!r}, and the model has recurrent state, which holds one "
            "position only; expected a model of attention layers"
        )
