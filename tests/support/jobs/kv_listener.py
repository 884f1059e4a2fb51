"""Subscribes to an engine's KV events as a router outside it does, and checks what they say."""

import msgspec
import zmq

QUIET_MS = 500


class KVListener:
    """Follows one engine's events from before its first request on."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        # Until the publisher knows of this subscriber.
        self._socket.poll(QUIET_MS)

    def report(self, scheduler) -> dict:
        """What the events amount to, against the scheduler's own cache.

        Returns:
            Numbers of events by kind; ``missed``: batches lost; ``unsaid`` and ``stale``: blocks
            that are cached and were not told, and the other way round.
        """
        from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        held, counts, numbers = set(), {}, []
        while self._socket.poll(QUIET_MS):
            _, number, payload = self._socket.recv_multipart()
            numbers.append(int.from_bytes(number, "big"))
            for event in decoder.decode(payload).events:
                kind = type(event).__name__
                counts[kind] = counts.get(kind, 0) + 1
                if isinstance(event, AllBlocksCleared):
                    held.clear()
                elif isinstance(event, BlockStored):
                    held.update(event.block_hashes)
                else:
                    held.difference_update(event.block_hashes)
        self._socket.close(linger=0)
        keys = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        cached = {maybe_convert_block_hash(get_block_hash(key)) for key in keys}
        return {
            "counts": counts,
            "missed": len(set(range(numbers[0], numbers[-1] + 1)) - set(numbers)),
            "held": len(held),
            "unsaid": len(cached - held),
            "stale": len(held - cached),
        }
