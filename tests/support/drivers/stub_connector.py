"""A KV connector that holds nothing, for tests of the scheduler."""

from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class StubConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side of a connector without a worker.

    Args:
        undecided_times: how often it knows nothing yet of a request that it is asked about.
        frees_blocks: says in every step that it is about to free blocks.

    Attributes:
        asked: how often it was asked, by request.
    """

    requires_kv_delivery = False
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None

    def __init__(self, *, undecided_times=0, frees_blocks=False):
        self.asked = Counter()
        self._undecided_times = undecided_times
        self._frees_blocks = frees_blocks

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.asked[request.request_id] += 1
        is_undecided = self.asked[request.request_id] <= self._undecided_times
        return (None if is_undecided else 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def has_pending_block_frees(self):
        return self._frees_blocks

    def request_finished_all_groups(self, request, block_ids):
        return False, None
