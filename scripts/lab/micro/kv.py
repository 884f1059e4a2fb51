"""``kv-micro``: times the KV cache manager's operations on a pool of 100 000 blocks.

Stock's manager, ours, and ours with thoughts to evict first; no model is run.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from meridian_patch.bench.progress import progress_bars
from meridian_patch.engine.kv_cache.manager import build_phase_kv_cache_manager
from meridian_patch.policy.retention import Retention, Tier
from micro.timing import (
    Rounds,
    Seconds,
    column,
    make_table,
    show,
    spread,
    take_rounds,
    write_figures,
)

BLOCK_SIZE = 16
BLOCKS = 100_000
REQUESTS = 1000
TOKENS = BLOCKS // REQUESTS * BLOCK_SIZE
THOUGHT = Retention(kept_tokens=TOKENS // 4, tier=Tier.THINK_COMPLETE)
STOCK, PLAIN, THINKING = "stock", "ours, no thought", "ours, thoughts"
OURS = (PLAIN, THINKING)
TOTAL = "all four"
# Until the heap looks as it will from then on.
WARM_UP_ROUNDS = 5


def run_kv_micro(rounds: int, out: Path, *, in_order: bool) -> int:
    """Time ``rounds`` interleaved rounds; print a table and write ``kv-micro.json``.

    Requests finish in a random order, or, ``in_order``, in the one they came in. The ratio of a
    round is taken within the round.
    """
    console = Console(markup=False, emoji=False)
    micro = KVMicro(in_order=in_order)
    count = rounds + WARM_UP_ROUNDS
    with progress_bars(console, transient=True) as progress:
        task = progress.add_task("rounds", total=count)
        seen = take_rounds(micro.round, count, lambda: progress.advance(task))
    figures = _figures({side: of_side[WARM_UP_ROUNDS:] for side, of_side in seen.items()})
    title = f"{REQUESTS} requests at once on {BLOCKS:,} blocks; median ratio (p20..p80)"
    rows = [
        (operation, f"{row['stock_us_per_request']:.1f}", *(show(row[s], ".3f") for s in OURS))
        for operation, row in figures.items()
    ]
    console.print(make_table(title, ("operation", "stock, µs/request", *OURS), rows))
    finish = "in order" if in_order else "random"
    report = {"rounds": rounds, "finish": finish, "operations": figures}
    write_figures(console, out / "kv-micro.json", report)
    return 0


def _figures(seen: Rounds) -> dict[str, dict[str, Any]]:
    """By operation, stock's median and each side's ratio to stock."""
    figures = {}
    for operation in seen[STOCK][0]:
        stock = column(seen[STOCK], operation)
        ratios = {side: spread(column(seen[side], operation) / stock) for side in OURS}
        figures[operation] = {"stock_us_per_request": float(np.median(stock)), **ratios}
    return figures


class KVMicro:
    """Stock's cache manager and ours, each with a pool of its own, under the same requests.

    Args:
        in_order: requests finish and hit in the order they came, not in a random one. The heap is
            then laid out in stock's order of eviction, which no server's is.

    Attributes:
        managers: by side.
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
        self.managers = {name: _build(ours) for name in (PLAIN, THINKING)}
        self.managers[STOCK] = _build(stock)

    def round(self) -> Iterator[tuple[str, Seconds]]:
        """Per side, seconds per request of allocate, free, hit and grow, and their sum."""
        self._sets[:2] = reversed(self._sets[:2])
        orders = [self._reorder(self._sets[0]) for _ in range(3)]
        for name, manager in self.managers.items():
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
        return seconds | {TOTAL: sum(seconds.values())}


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
