"""What engines that hand requests off must have in common, and which connectors can do it."""

import hashlib
import json
from typing import Any, Final

from vllm.logger import init_logger

from meridian_patch.errors import ConfigError
from meridian_patch.handoff.ticket import KVLayout

logger = init_logger("vllm.meridian_patch")

NIXL_CONNECTORS: Final = ("NixlConnector", "NixlPullConnector")
"""Names of vLLM's connector over NIXL, whose engine reads what another one keeps."""

CONNECTORS: Final = (*NIXL_CONNECTORS, "MooncakeConnector")
"""Connectors of vLLM that let another engine read a finished request's KV cache."""

_MOST_LOGGED: Final = 16


def layout_of(vllm_config: Any) -> KVLayout:
    """The layout of an engine's KV cache."""
    model = vllm_config.model_config
    # The values of a KV cache depend on them: overrides, quantization, and which weights.
    values = [model.hf_config.to_dict(), model.quantization, model.revision]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode())
    return KVLayout(
        model=str(model.model),
        weights=digest.hexdigest()[:16],
        block_size=vllm_config.cache_config.block_size,
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        dtype=str(vllm_config.model_config.dtype),
    )


class Reasons:
    """Logs each reason why KV caches are computed again once.

    They may hold values of requests, so there may be any number of them: the first 16 are logged.

    Args:
        where: on which engine they are not used.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._logged: set[str] = set()

    def log(self, why: str) -> None:
        """Log a reason, unless it was logged before."""
        if why not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(why)
            logger.error("meridian_patch: %s: %s", self._where, why)


def is_mapping(request: Any) -> bool:
    """Whether a request's ``kv_transfer_params`` can be read; others are removed.

    A request may set them to anything through ``vllm_xargs``, and connectors expect a mapping.
    """
    params = request.kv_transfer_params
    if params is None or isinstance(params, dict):
        return True
    request.kv_transfer_params = None
    return False


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
    one_way = {"think": "kv_consumer", "answer": "kv_producer"}[role]
    if transfer.kv_role == one_way:
        raise ConfigError(
            f"handoff.role is {role!r}, and kv_role of the KV connector is {one_way!r}, expected "
            "'kv_both'"
        )
    if role == "answer" and transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "handoff.role is 'answer', and kv_load_failure_policy of the KV connector is "
            f"{transfer.kv_load_failure_policy!r}, which ends a request whose KV cache does not "
            "arrive; expected 'recompute'"
        )
    side = getattr(scheduler.connector, "connector_scheduler", None)
    if getattr(side, "use_host_buffer", False):
        raise ConfigError(
            f"handoff.role is {role!r}, and the KV connector copies through the host's memory "
            "(kv_buffer_device is 'cpu'), which saves no generated token; expected the device's "
            "own memory"
        )
    # Load-bearing: prompt tokens that the connector cuts off a request that is offered.
    backoff = getattr(side, "_prefill_backoff", None)
    if scheduler.kv_cache_config.has_mamba_layers or (backoff is not None and backoff() > 0):
        raise ConfigError(
            f"handoff.role is {role!r}, and the connector leaves the end of a prompt to the other "
            "engine, as for recurrent states and several draft modules; expected a model of "
            "attention layers with at most one draft module"
        )
