"""The client of EngineCore in a server, whose requests may answer at other engines."""

import asyncio
import functools
import time
from typing import Any

from vllm.v1.engine.core_client import MPClient

from meridian_patch.config.load import process_config
from meridian_patch.engine import status
from meridian_patch.engine.handoff.answer_servers import AnswerServers, same_as
from meridian_patch.engine.handoff.grammars import binds_thoughts
from meridian_patch.engine.handoff.second_legs import COUNTS_SAMPLED, SecondLegs
from meridian_patch.telemetry.handoffs import OF_THIS_PROCESS

_POLL_S = 0.05


def build_engine_client(original: type) -> type:
    """``original`` whose requests go on at answer engines, if the configuration names any."""
    upstream = getattr(original, "process_engine_outputs", None)

    class MovingClient(original):
        meridian_legs: SecondLegs | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            status.publish(is_server=True)
            config = process_config().config.handoff
            if config.answer_urls:
                servers = AnswerServers(config, same_as(self.vllm_config), self.client_index)
                self.meridian_legs = SecondLegs(
                    servers,
                    # Load-bearing: the queue that the engine's output handler reads.
                    deliver=self.outputs_queue.put_nowait,
                    add=super().add_request_async,
                    rank_of=functools.partial(_rank_of, self),
                    handoffs=OF_THIS_PROCESS,
                    binds_thoughts=binds_thoughts(self.vllm_config),
                    most_logprobs=_most_logprobs(self.vllm_config),
                )

        async def add_request_async(self, request: Any) -> None:
            legs = self.meridian_legs
            await super().add_request_async(request if legs is None else legs.offered(request))

        async def abort_requests_async(self, request_ids: list[str]) -> None:
            legs = self.meridian_legs
            await super().abort_requests_async(
                request_ids if legs is None else legs.aborted(request_ids)
            )

        # Load-bearing: vLLM calls what the class has by this name on the way to the queue.
        @staticmethod
        async def process_engine_outputs(client: Any, outputs: Any) -> None:
            if upstream is not None:
                await upstream(client, outputs)
            if client.meridian_legs is not None:
                client.meridian_legs.take(outputs)

        def shutdown(self, timeout: float | None = None) -> None:
            left_s = _drained(self, timeout)
            if self.meridian_legs is not None:
                # Load-bearing: vLLM's server ends when its requests have, and EngineCore does not
                # know these.
                self.meridian_legs.end()
            # Load-bearing: vLLM shuts the client of an engine that died down, too.
            is_lost = self.resources.engine_dead
            super().shutdown(left_s)
            # A program may end its engine and go on.
            status.publish(is_server=is_lost or None)

    return MovingClient


def _drained(client: Any, timeout: float | None) -> float | None:
    """Wait for legs, of which EngineCore does not know; what is left of the time."""
    legs = client.meridian_legs
    if legs is None or not timeout or _is_on_loop():
        return timeout
    until_s = time.monotonic() + timeout
    legs.is_draining = True
    while legs.num_away and time.monotonic() < until_s and not client.resources.engine_dead:
        time.sleep(_POLL_S)
    return max(until_s - time.monotonic(), 0.0)


def _is_on_loop() -> bool:
    """Whether the loop that legs need waits for us: vLLM shuts down once more at the very end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _most_logprobs(vllm_config: Any) -> int | None:
    """How many an answer engine gives, with the limit that this one has."""
    most = vllm_config.model_config.max_logprobs
    return most - 1 if COUNTS_SAMPLED and most >= 0 else None


def _rank_of(client: MPClient, engine_index: int) -> int | None:
    """Where a request that comes back goes: to the rank whose prefix cache has its tokens."""
    ranks = client.engine_ranks_managed
    return ranks.index(engine_index) if len(ranks) > 1 and engine_index in ranks else None
