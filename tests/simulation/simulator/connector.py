"""A KV connector that moves nothing: remote loads that take some steps, and frees that wait."""

import zlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput


class _Nothing(KVConnectorMetadata):
    """Workers are told nothing."""


class SimConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side, and what the workers would report.

    Attributes:
        fails: draws whether a load fails; set by the simulator.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._loads: bool = extra["loads"]
        self._delays: bool = extra["delays"]
        self._block_size = vllm_config.cache_config.block_size
        self._step = 0
        # Step at which each is done.
        self._loading: dict[str, tuple[int, tuple[list[int], ...]]] = {}
        self._sending: dict[str, int] = {}
        self._asked: set[str] = set()
        self.fails = lambda: False
        # Requests that a failed load may end.
        self.failed: set[str] = set()

    @property
    def is_busy(self) -> bool:
        """Blocks are held for a transfer."""
        return bool(self._loading or self._sending)

    def report(self, finished: set[str]) -> KVConnectorOutput | None:
        """What the workers say of transfers when the next step's output comes back."""
        self._step += 1
        received = [name for name, (due, _) in self._loading.items() if due <= self._step]
        sent = [name for name, due in self._sending.items() if due <= self._step]
        if not (received or sent):
            return None
        output = KVConnectorOutput(
            finished_sending=set(sent) or None, finished_recving=set(received) or None
        )
        for name in received:
            _, blocks = self._loading.pop(name)
            if self.fails():
                self.failed.add(name)
                if len(blocks) == 1 and blocks[0] and self._step % 2:
                    output.invalid_block_ids.add(blocks[0][-1])
                else:
                    output.failed_recving.add(name)
        for name in sent:
            del self._sending[name]
        return output

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        name = request.request_id
        draw = zlib.crc32(name.encode())
        if not self._loads or draw % 2 or name in self.failed:
            return 0, False
        if name not in self._asked:
            # It is looked up first, which takes a step.
            self._asked.add(name)
            if draw % 3 == 0:
                return None, False
        known = min(request.num_prompt_tokens, request.num_tokens - 1)
        there = known // self._block_size * self._block_size
        return max(there - num_computed_tokens, 0), there > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            due = self._step + 1 + zlib.crc32(request.request_id.encode()) % 7
            self._loading[request.request_id] = due, blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: Any) -> _Nothing:
        return _Nothing()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._asked.discard(request.request_id)
        if request.request_id in self._loading or not self._delays or not block_ids:
            return False, None
        if zlib.crc32(request.request_id.encode()) % 3 == 0:
            return False, None
        self._sending[request.request_id] = self._step + 2 + len(block_ids) % 5
        return True, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        return True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is moved."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is moved."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is moved."""

    def wait_for_save(self) -> None:
        """Nothing is moved."""
