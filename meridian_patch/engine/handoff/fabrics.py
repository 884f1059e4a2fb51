"""What the connectors of vLLM need besides blocks: names of transfers and addresses."""

import time
from typing import Any, Protocol

from vllm.utils.network_utils import get_ip


class Fabric(Protocol):
    """A connector's way of naming what the other engine is to read."""

    def offer(self, request: Any) -> None:
        """Prepare a request that may leave, before the connector knows it."""

    def address(self, request: Any, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The connector's part of a ticket; None if it keeps nothing.

        Args:
            request: the request that leaves.
            params: what the connector returned for it.
        """

    def release(self, scheduler: Any, request_id: str) -> None:
        """Free the blocks of a request that left, because no engine will read them.

        Args:
            scheduler: of this engine.
            request_id: it may be unknown, or have been read already.
        """


class NixlFabric:
    """NIXL: the connector names transfers by itself."""

    def release(self, scheduler: Any, request_id: str) -> None:
        """Let the connector's lease end now instead of in half a minute."""
        request = scheduler.requests.get(request_id)
        if request is None or not request.is_finished():
            return
        # Load-bearing: workers take the newest end of a lease, and free what is past it.
        side = scheduler.connector.connector_scheduler
        side._reqs_need_send[request_id] = time.perf_counter()

    def offer(self, request: Any) -> None:
        """Nothing to prepare."""

    def address(self, _request: Any, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """What the connector returned."""
        return params or None


class MooncakeFabric:
    """Mooncake: the caller names transfers, and finds engines by their bootstrap server.

    Args:
        vllm_config: of this engine.
    """

    def __init__(self, vllm_config: Any) -> None:
        # Only an engine with this connector imports it.
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (
            mooncake_connector,
        )

        # Load-bearing: where workers of this engine register, and others ask for them.
        host, port = mooncake_connector.get_mooncake_bootstrap_addr(vllm_config)
        # The server listens on all addresses; others cannot reach the loopback one.
        host = get_ip() if host in {"127.0.0.1", "localhost"} else host
        self._engine = {
            "remote_engine_id": vllm_config.kv_transfer_config.engine_id,
            "remote_bootstrap_addr": f"http://{host}:{port}",
        }

    def offer(self, request: Any) -> None:
        """Name the transfer."""
        request.kv_transfer_params.setdefault("transfer_id", request.request_id)

    def release(self, scheduler: Any, request_id: str) -> None:
        """Nothing: its tickets do not name the request, and its workers keep their own time."""

    def address(self, request: Any, _params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Where the other engine finds the blocks of this transfer."""
        transfer_id = request.kv_transfer_params["transfer_id"]
        return {"do_remote_prefill": True, "transfer_id": transfer_id, **self._engine}


def fabric_of(vllm_config: Any) -> Fabric:
    """The fabric of an engine's connector, one of ``layout.CONNECTORS``."""
    if vllm_config.kv_transfer_config.kv_connector == "MooncakeConnector":
        return MooncakeFabric(vllm_config)
    return NixlFabric()
