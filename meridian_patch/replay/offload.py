"""An offload tier for replays: vLLM's own offloading connector, with copies in virtual time.

The scheduler side is what ``--kv-offloading-size`` runs, and so is the worker side down to the
copies. These take ``bytes / bandwidth`` each, one after the other per direction, beside the model:
a request waits for its own load while others run. Left out: what a copy takes from the memory
bandwidth of a step, and the time to launch it.
"""

import logging
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.math_utils import round_up
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from meridian_patch.replay.types import ReplayArm

# 8 B parameters, 32 layers, 8 KV heads of 128, two bytes each for key and value.
KV_BYTES_PER_TOKEN = 131_072
_UNLIMITED_BLOCKS = 1 << 40
_GB = 1e9


def transfer_config(arm: ReplayArm, spec: KVCacheSpec) -> KVTransferConfig | None:
    """The connector's part of vLLM's configuration; None for an arm without a tier.

    Args:
        arm: its tier keeps all KV.
        spec: of the KV cache that is replayed; its sizes in bytes are not those of a real model.
    """
    if arm.offload_gb_per_s is None:
        return None
    # vLLM logs at each replay that the connector is in use and experimental.
    for name in ("vllm.distributed.kv_transfer", "vllm.v1.kv_offload"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Load-bearing: vLLM rounds each offloaded block up to this many bytes.
    block_bytes = round_up(spec.page_size_bytes, CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT)
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_bytes_to_use": _UNLIMITED_BLOCKS * block_bytes,
            # Load-bearing: by default vLLM offloads prompts alone, and what a preempted request
            # has generated is computed again.
            "offload_prompt_only": False,
        },
    )


class OffloadTier:
    """The worker side of the connector of one scheduler under test.

    Args:
        scheduler: built with ``transfer_config``.
        gb_per_s: of each direction, in 10^9 bytes per second.
        kv_bytes_per_token: KV of one token on the machine that is replayed.
    """

    def __init__(self, scheduler: Any, gb_per_s: float, kv_bytes_per_token: int) -> None:
        self._scheduler = scheduler
        self._block_tokens = scheduler.block_size
        self._copies = _Copies(self._block_tokens * kv_bytes_per_token / (gb_per_s * _GB))
        self._connector: Any = KVConnectorFactory.create_connector(
            scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config
        )
        # Load-bearing: upstream builds its worker when KV caches are registered, which needs a GPU.
        self._connector.connector_worker.worker = self._copies

    @property
    def is_busy(self) -> bool:
        """Steps are still needed: a copy is under way, or a finished request not yet reported."""
        return bool(self._scheduler.has_requests())

    @property
    def is_copying(self) -> bool:
        """A copy that the scheduler waits for is under way or about to start."""
        return bool(self._scheduler.connector.has_pending_push_work())

    @property
    def reloaded_tokens(self) -> int:
        """Tokens whose load was started since the start."""
        return self._copies.loaded_blocks * self._block_tokens

    def next_done_s(self, now: float) -> float:
        """When the first copy under way is done; ``now`` when there is none."""
        return self._copies.next_done_s(now)

    def run(self, output: Any, result: ModelRunnerOutput, now: float, step_s: float) -> float:
        """Do what the worker does in a step.

        Args:
            output: of the scheduler.
            result: of the model; gets what the worker reports of copies that are done.
            now: when the step begins.
            step_s: what the model takes for it.

        Returns:
            Seconds by which copies hold the step up.
        """
        connector, copies = self._connector, self._copies
        metadata = output.kv_connector_metadata
        copies.now = copies.begin = now
        # Load-bearing: waits for stores whose blocks this step writes over.
        connector.handle_preemptions(metadata)
        held_s = copies.now - now
        # Load-bearing: upstream starts a step's copies behind its forward pass.
        copies.begin = copies.now + step_s
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        _, received = connector.get_finished(output.finished_req_ids)
        result.kv_connector_output = KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return held_s


class _Copies(OffloadingWorker):
    """Copies that take time and move nothing.

    Attributes:
        now: the virtual clock; a wait sets it forward.
        begin: the earliest time at which a copy submitted now starts.
    """

    def __init__(self, seconds_per_block: float) -> None:
        self.now = 0.0
        self.begin = 0.0
        self.loaded_blocks = 0
        self._seconds_per_block = seconds_per_block
        self._loads_done_s = 0.0
        self._stores_done_s = 0.0
        self._done_s: dict[int, float] = {}

    def submit_store(
        self,
        job_id: int,
        src_spec: GPULoadStoreSpec,
        dst_spec: LoadStoreSpec,  # noqa: ARG002 - the interface
    ) -> bool:
        start = max(self.begin, self._stores_done_s)
        self._stores_done_s = start + self._seconds(src_spec)
        self._done_s[job_id] = self._stores_done_s
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,  # noqa: ARG002 - the interface
        dst_spec: GPULoadStoreSpec,
    ) -> bool:
        self.loaded_blocks += len(dst_spec.block_ids)
        start = max(self.begin, self._loads_done_s)
        self._loads_done_s = start + self._seconds(dst_spec)
        self._done_s[job_id] = self._loads_done_s
        return True

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, done_s in self._done_s.items() if done_s <= self.now]
        for job_id in done:
            del self._done_s[job_id]
        return [TransferResult(job_id, success=True) for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        self.now = max(self.now, *(self._done_s.get(job_id, 0.0) for job_id in job_ids))

    def next_done_s(self, now: float) -> float:
        return max(now, min(self._done_s.values(), default=now))

    def _seconds(self, spec: BlockIDsLoadStoreSpec) -> float:
        return len(spec.block_ids) * self._seconds_per_block
