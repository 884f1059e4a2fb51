"""Times the KV cache manager's operations on a pool of 100 000 blocks, without a model."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from meridian_patch.engine.kv_cache.manager import build_phase_kv_cache_manager
from meridian_patch.policy.retention import Retention, Tier

BLOCK_SIZE = 16
BLOCKS = 100_000
REQUESTS = 1000
TOKENS = BLOCKS // REQUESTS * BLOCK_SIZE
THOUGHT = Retention(kept_tokens=TOKENS // 4, tier=Tier.THINK_COMPLETE)
STOCK, PLAIN, THINKING = "stock", "ours, no thought", "ours, thoughts"

Seconds = dict[str, float]


class KVMicro:
    """Stock's cache manager and ours, each with a pool of its own, under the same requests.

    Args:
        in_order: requests finish and hit in the order they came, not in a random one. The heap is
            then laid out in stock's order of eviction, which no server's is.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        self._rng = None if in_order else random.Random(0)
        # Any hash does; the cheapest shows most of the rest.
        init_none_hash(_hash)
        # Two sets take turns, so that no block is allocated while cached; a third one grows.
        self._sets = [
            [_make_request(f"{name}{number}", tokens) for number in range(REQUESTS)]
            for name, tokens in (("a", TOKENS), ("b", TOKENS), ("grow", BLOCK_SIZE))
        ]
        # Where the patches are live the name holds our class.
        stock = next(c for c in KVCacheManager.__mro__ if c.__module__.startswith("vllm."))
        ours = build_phase_kv_cache_manager(stock)
        self._managers = {name: _build(ours) for name in (PLAIN, THINKING)}
        self._managers[STOCK] = _build(stock)

    def round(self) -> Iterator[tuple[str, Seconds]]:
        """Per arm, the seconds per request of each operation: allocate, free, hit, grow."""
        self._sets[:2] = reversed(self._sets[:2])
        orders = [self._reorder(self._sets[0]) for _ in range(3)]
        for name, manager in self._managers.items():
            yield name, self._cycle(manager, orders, THOUGHT if name == THINKING else None)

    def _reorder(self, requests: list[Request]) -> list[Request]:
        return self._rng.sample(requests, len(requests)) if self._rng else requests

    def _cycle(
        self, manager: Any, orders: list[list[Request]], retention: Retention | None
    ) -> Seconds:
        requests, _, growing = self._sets
        first_end, hit, second_end = orders
        seconds = {
            "allocate": _time(requests, lambda r: manager.allocate_slots(r, TOKENS)),
            "free": _time(first_end, lambda r: _free(manager, r, retention)),
            "hit": _time(hit, lambda r: _hit(manager, r)),
        }
        _time(second_end, lambda r: _free(manager, r, retention))
        # Decoding: slots for one token at a time, for as long as one block lasts.
        seconds["grow"] = _time(growing, lambda r: _grow(manager, r))
        _time(growing, lambda r: _free(manager, r, None))
        return seconds


def _time(requests: Sequence[Request], operation: Callable[[Request], None]) -> float:
    """Seconds per request."""
    start = time.perf_counter()
    for request in requests:
        operation(request)
    return (time.perf_counter() - start) / len(requests)


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
    manager = cls(
        kv_cache_config=config,
        max_model_len=TOKENS,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )
    # A pool that has served for a while: neighbours in the queue are far apart in memory.
    blocks = manager.block_pool.get_new_blocks(BLOCKS)
    random.Random(0).shuffle(blocks)
    manager.block_pool.free_blocks(blocks)
    return manager


def _make_request(request_id: str, tokens: int) -> Request:
    rng = random.Random(request_id)
    return Request(
        request_id=request_id,
        prompt_token_ids=[rng.randrange(1000) for _ in range(tokens)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, _hash),
    )


def _hash(value: Any) -> bytes:
    return hash(value).to_bytes(8, "little", signed=True)
