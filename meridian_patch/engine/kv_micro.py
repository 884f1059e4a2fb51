"""Times the KV cache manager's operations on a pool of 100 000 blocks, without a model."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from meridian_patch.engine.kv_cache import build_phase_kv_cache_manager
from meridian_patch.policy.retention import Retention, Tier

BLOCK_SIZE = 16
BLOCKS = 100_000
REQUESTS = 1000
TOKENS = BLOCKS // REQUESTS * BLOCK_SIZE
THOUGHT = Retention(kept_tokens=TOKENS // 4, tier=Tier.THINK_COMPLETE)
STOCK, PLAIN, THINKING = "stock", "ours, no thought", "ours, thoughts"

Seconds = dict[str, float]


class KVMicro:
    """Stock's cache manager and ours, each with a pool of its own, under the same requests."""

    def __init__(self) -> None:
        # Any hash does; the cheapest shows most of the rest.
        init_none_hash(_hash)
        self._requests = [_make_request(number) for number in range(REQUESTS)]
        # Where the patches are live the name holds our class.
        stock = next(c for c in KVCacheManager.__mro__ if c.__module__.startswith("vllm."))
        ours = build_phase_kv_cache_manager(stock)
        self._managers = {name: _build(ours) for name in (PLAIN, THINKING)}
        self._managers[STOCK] = _build(stock)

    def round(self) -> Iterator[tuple[str, Seconds]]:
        """Per arm, the seconds per request of each operation: allocate, free, hit, grow."""
        for name, manager in self._managers.items():
            total = self._cycle(manager, THOUGHT if name == THINKING else None)
            yield name, {operation: s / REQUESTS for operation, s in total.items()}

    def _cycle(self, manager: Any, retention: Retention | None) -> Seconds:
        seconds = {
            "allocate": self._time(lambda r: manager.allocate_slots(r, TOKENS)),
            "free": self._time(lambda r: _free(manager, r, retention)),
            "hit": self._time(lambda r: _hit(manager, r)),
        }
        self._time(lambda r: _free(manager, r, retention))
        # Decoding: slots for one token at a time, for as long as one block lasts.
        seconds["grow"] = self._time(lambda r: _grow(manager, r))
        self._time(lambda r: _free(manager, r, None))
        for request in self._requests:
            request.num_computed_tokens = 0
        return seconds

    def _time(self, operation: Callable[[Request], None]) -> float:
        start = time.perf_counter()
        for request in self._requests:
            operation(request)
        return time.perf_counter() - start


def _free(manager: Any, request: Request, retention: Retention | None) -> None:
    if retention is None:
        manager.free(request)
        return
    manager.begin_free(request.request_id, retention)
    manager.free(request)
    manager.end_free()


def _hit(manager: Any, request: Request) -> None:
    blocks, num_tokens, _ = manager.get_computed_blocks(request)
    manager.allocate_slots(request, TOKENS - num_tokens, num_tokens, blocks)
    manager.record_prefix_cache_stats(request, num_tokens)


def _grow(manager: Any, request: Request) -> None:
    for num_tokens in range(BLOCK_SIZE):
        request.num_computed_tokens = num_tokens
        manager.allocate_slots(request, 1)


def _build(cls: type) -> Any:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float16
    )
    config = KVCacheConfig(
        num_blocks=BLOCKS + 1,  # with vLLM's null block
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return cls(
        kv_cache_config=config,
        max_model_len=TOKENS,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )


def _make_request(number: int) -> Request:
    rng = random.Random(number)
    return Request(
        request_id=str(number),
        prompt_token_ids=[rng.randrange(1000) for _ in range(TOKENS)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, _hash),
    )


def _hash(value: Any) -> bytes:
    return hash(value).to_bytes(8, "little", signed=True)
