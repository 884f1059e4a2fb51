"""Carries how many requests answer from each rank to all that compute each step with it.

The number is advice. It is sent and received without waiting; a rank that receives none decides as
if it were alone. So a rank that is stopped, paused, gone, or without this plug-in blocks no other.
"""

import struct
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import zmq
from torch._C._distributed_c10d import TCPStore
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip

logger = init_logger("vllm.meridian_patch")

# How long an engine that starts waits for the other ranks to say where they are heard.
_MEETING = timedelta(seconds=10)
# A rank on which requests answer says so in each of its steps. Silence means that it does not step.
_STALE_S = 1.0
# The rank, and its running requests that answer.
_MESSAGE = struct.Struct("!2I")


class Exchange(Protocol):
    """Carries the numbers."""

    def tell(self, answering: int) -> None:
        """Send how many requests answer on this rank to all others; returns at once."""

    def hear(self) -> int:
        """How many answered last on all other ranks, without those that fell silent."""


class ZmqExchange:
    """An exchange over ZeroMQ, between processes on any machines.

    Args:
        rank: of this process.
        endpoint_host: address under which the others reach this machine.
    """

    def __init__(self, rank: int, endpoint_host: str) -> None:
        self._rank = rank
        # By rank: when it was heard, and how many answered there.
        self._heard: dict[int, tuple[float, int]] = {}
        context = zmq.Context()
        self._told = context.socket(zmq.PUB)
        self._told.setsockopt(zmq.LINGER, 0)
        self._told.setsockopt(zmq.IPV6, ":" in endpoint_host)
        host = f"[{endpoint_host}]" if ":" in endpoint_host else endpoint_host
        port = self._told.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._context = context
        self._others: list[zmq.Socket[bytes]] = []
        self.close = weakref.finalize(self, context.destroy, 0)

    def connect(self, endpoints: Mapping[int, str]) -> None:
        """Listen to other ranks, by rank."""
        for rank, endpoint in endpoints.items():
            if rank == self._rank:
                continue
            other = self._context.socket(zmq.SUB)
            other.setsockopt(zmq.LINGER, 0)
            other.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
            other.setsockopt(zmq.SUBSCRIBE, b"")
            # Of what came while this rank took no step only the last message counts; without this
            # the queue fills and drops that one.
            other.setsockopt(zmq.CONFLATE, 1)
            other.connect(endpoint)
            self._others.append(other)

    def tell(self, answering: int) -> None:
        # A publisher never blocks: what a listener does not take up is dropped.
        self._told.send(_MESSAGE.pack(self._rank, answering), zmq.NOBLOCK)

    def hear(self) -> int:
        now_s = time.monotonic()
        for other in self._others:
            message = other.recv(zmq.NOBLOCK) if other.poll(0) else b""
            if len(message) == _MESSAGE.size:
                rank, answering = _MESSAGE.unpack(message)
                self._heard[rank] = now_s, answering
        heard = self._heard.values()
        return sum(answering for heard_s, answering in heard if now_s - heard_s < _STALE_S)


def join_ranks(vllm_config: Any) -> Exchange | str | None:
    """An exchange with the ranks that compute each step together with this one.

    Returns:
        Why there is none, if there should be one; None: this rank steps alone.
    """
    parallel = vllm_config.parallel_config
    # Load-bearing: only ranks of a mixture of experts step together. vLLM sets the size of others
    # to 1 before it builds the scheduler.
    if parallel.data_parallel_size == 1 or not vllm_config.model_config.is_moe:
        return None
    if parallel.enable_elastic_ep:
        return "the number of ranks may change (elastic expert parallelism)"
    return _meet(parallel)


def _meet(parallel: Any) -> Exchange | str:
    # Load-bearing: vLLM's own store, in which its ranks agree on a port. In vLLM 0.32 it lives
    # until all engines have started.
    port = parallel._coord_store_port
    if not port:
        return "vLLM keeps no store in which its ranks could meet"
    rank, size = parallel.data_parallel_rank, parallel.data_parallel_size
    is_local = parallel.data_parallel_size_local == size
    exchange = None
    names = [f"meridian_patch/rank/{each}" for each in range(size)]
    try:
        exchange = ZmqExchange(rank, "127.0.0.1" if is_local else get_ip())
        store = TCPStore(
            parallel.data_parallel_master_ip, port, is_master=False, timeout=_MEETING,
            wait_for_workers=False,
        )  # fmt: skip
        store.set(names[rank], exchange.endpoint)
        # Load-bearing: ranks agree on the size of the KV cache just before, so they are all here.
        store.wait(names, _MEETING)
        exchange.connect({each: store.get(name).decode() for each, name in enumerate(names)})
    except Exception as error:
        if exchange is not None:
            exchange.close()
        logger.warning("meridian_patch: this rank does not meet the others", exc_info=error)
        return f"the ranks did not meet within {_MEETING.seconds} s"
    return exchange
