"""A KV tier in host memory for vLLM's OffloadingConnector on a CPU, which vLLM has for GPUs alone.

The connector, its scheduler side and its manager are vLLM's; only the copies are made here, at
once where a GPU would make them in a stream. Named by ``kv_connector_extra_config``:
``"spec_name": "CopiedTier", "spec_module_path": "copied_tier"``.
"""

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

STORED, LOADED = "copied_tier: blocks stored: ", "copied_tier: blocks loaded: "


class CopiedTier(CPUOffloadingSpec):
    """vLLM's own tier, with the worker below."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            self._worker = CopyingWorker(kv_caches, self.num_chunks)
        return self._worker


class CopyingWorker(OffloadingWorker):
    """Copies whole blocks at once, and prints how many."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        [_] = kv_caches.group_data_refs
        self._blocks = [each.tensor.view(torch.int8) for each in kv_caches.tensors]
        self._tier = [
            torch.zeros((chunks, *each.shape[1:]), dtype=torch.int8) for each in self._blocks
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        print(f"{STORED}{len(src_spec.block_ids)}", flush=True)
        return self._copy(job_id, self._blocks, src_spec, self._tier, dst_spec)

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        print(f"{LOADED}{len(dst_spec.block_ids)}", flush=True)
        return self._copy(job_id, self._tier, src_spec, self._blocks, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids) -> None:
        """Copies are made when they are submitted."""

    def _copy(self, job_id, sources, src_spec, targets, dst_spec) -> bool:
        src, dst = (torch.from_numpy(spec.block_ids).long() for spec in (src_spec, dst_spec))
        for source, target in zip(sources, targets, strict=True):
            target[dst] = source[src]
        self._done.append(TransferResult(job_id, success=True))
        return True
