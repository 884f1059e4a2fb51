"""Replays with vLLM's SimpleCPUOffloadConnector, whose copies take time and move nothing."""

from dataclasses import replace

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from meridian_patch.replay import engine as replay_engine
from meridian_patch.replay import scheduler as replay_scheduler

BLOCK_BYTES = 8192


def use_simple_offload(monkeypatch: pytest.MonkeyPatch, tier_blocks: int, **extra: object) -> None:
    """Give every arm with a tier this connector; ``extra`` is its configuration.

    Load-bearing: the worker side needs CUDA streams, so it is replaced. Metadata and reports are
    upstream's own.
    """
    extra = {"cpu_bytes_to_use": tier_blocks * BLOCK_BYTES, **extra}

    def transfer_config(arm, spec):
        if arm.offload_gb_per_s is None:
            return None
        return KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )

    build = replay_scheduler.KVCacheConfig

    def with_tensors(num_blocks, kv_cache_tensors, kv_cache_groups):
        tensor = KVCacheTensor(
            size=num_blocks * BLOCK_BYTES,
            layers=["layer"],
            layer_stride=num_blocks * BLOCK_BYTES,
            block_stride=BLOCK_BYTES,
            offset=0,
        )
        return replace(build(num_blocks, [], kv_cache_groups), kv_cache_tensors=[tensor])

    monkeypatch.setattr(replay_scheduler, "transfer_config", transfer_config)
    monkeypatch.setattr(replay_scheduler, "KVCacheConfig", with_tensors)
    monkeypatch.setattr(replay_engine, "OffloadTier", SimpleTier)


class SimpleTier:
    """The worker side: each event is done ``delay_s`` after its step, in virtual time."""

    def __init__(self, scheduler, gb_per_s, kv_bytes_per_token):
        self._scheduler = scheduler
        self._block_tokens = scheduler.block_size
        self._block_s = self._block_tokens * kv_bytes_per_token / (gb_per_s * 1e9)
        # Done at, and what is reported then.
        self._loads = {}
        self._stores = {}
        self.loaded_blocks = 0
        # Hashes of all blocks that were ever stored.
        self.stored = set()

    @property
    def is_busy(self):
        return bool(self._scheduler.has_requests())

    @property
    def is_copying(self):
        manager = self._scheduler.connector.scheduler_manager
        return bool(manager._reqs_to_load or manager.has_pending_stores())

    @property
    def reloaded_tokens(self):
        return self.loaded_blocks * self._block_tokens

    def next_done_s(self, now):
        return max(now, min([*self._loads, *self._stores], default=now))

    def run(self, output, result, now, step_s):
        metadata = output.kv_connector_metadata
        pool = self._scheduler.kv_cache_manager.block_pool
        held_s = 0.0
        if metadata.need_flush and (self._loads or self._stores):
            # Upstream waits for all copies before blocks of a victim are reused.
            held_s = max(0.0, max([*self._loads, *self._stores]) - now)
        begin = now + held_s + step_s
        if metadata.load_gpu_blocks:
            done = begin + len(metadata.load_gpu_blocks) * self._block_s
            names = metadata.load_event_to_reqs[metadata.load_event]
            self._loads.setdefault(done, set()).update(names)
            self.loaded_blocks += len(metadata.load_gpu_blocks)
        if metadata.store_gpu_blocks:
            self.stored |= {pool.blocks[each].block_hash for each in metadata.store_gpu_blocks}
            done = begin + len(metadata.store_gpu_blocks) * self._block_s
            self._stores.setdefault(done, []).append(metadata.store_event)
        received, events = set(), {}
        for done in [each for each in self._loads if each <= now + held_s]:
            received |= self._loads.pop(done)
        for done in [each for each in self._stores if each <= now + held_s]:
            events |= dict.fromkeys(self._stores.pop(done), 1)
        result.kv_connector_output = KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=(
                SimpleCPUOffloadWorkerMetadata(completed_store_events=events) if events else None
            ),
        )
        return held_s
